"""Throw parts of the project out: `python scripts/rooms.py check wandb`. Nothing needs to be installed.

Such a part, a room, is its files (FILES), and each line elsewhere that ends with `# room: NAME`. A line of several
rooms goes with the last of them if it says `# room: wandb trackers`, and with the first if it says
`# room: text+examples`. docs/make-it-yours.md says what each room does.
"""

import re
import subprocess
import sys
from pathlib import Path

FILES = {
    "check": "src/check tests/check tests/text/test_check.py docs/check.md",
    "checkpoints": "src/tools/checkpoints.py tests/test_checkpoint_tool.py tests/text/test_checkpoint_tool.py",
    "cpu": "src/training/cpu tests/test_cpu.py",
    "cuda_graphs": "src/training/cuda_graph.py",
    "evaluate": "src/tools/evaluate.py tests/test_evaluate.py tests/text/test_evaluate.py",
    "generate": "src/tools/generate.py tests/text/test_generate.py",
    "gpu": "tests/gpu tests/gpu.mk docs/gpu.md",
    "launch_guard": "src/distributed/launch_guard.py tests/test_guard.py",
    "machines": "src/distributed/machines.py launchers tests/machines accelerate_configs/multi_node_*.yaml"
    " docs/machines.md docs/slurm.md docs/kubernetes.md",
    "mirror": "src/checkpoint/mirror.py tests/test_mirror.py tests/mirror_kills.py",
    "performance": "src/tracking/performance.py tests/test_performance.py tests/text/test_performance.py"
    " docs/performance.md",
    "report": "src/tracking/report.* src/tracking/figures.py tests/test_report.py docs/report.png",
    "sweep": "src/tools/sweep.py sweeps tests/test_sweep.py tests/test_wandb_sweep.py docs/sweeps.md",
    "text": "src/tasks/text tests/text configs/shakespeare.yaml configs/sst2.yaml sweeps/shakespeare.yaml"
    " sweeps/sst2.yaml examples/dpo.* examples/token_classification.* examples/make_text.py src/tools/generate.py"
    " docs/transformers.md",
    "trackers": "src/tracking/accelerate_trackers.py tests/test_trackers.py",
    "wandb": "src/tracking/wandb.py src/config/tracking.py tests/test_wandb_logger.py tests/test_wandb_settings.py"
    " tests/test_wandb_sweep.py",
    "benchmarks": "benchmarks docs/figures.md tests/test_benchmarks.py",
    "examples": "examples docs/examples.md tests/test_examples.py tests/text/test_examples.py",
    "course": "docs/learn tests/test_learn.py",
    "rooms": "scripts/rooms.py docs/make-it-yours.md",
    "template": "scripts/new* scripts/stub* tests/test_new_project.py tests/test_rooms.py .ci CITATION.cff"
    " docs/run.svg",
}
"""The files and folders of each room."""
SHARED = {
    "src/config/trackers.py": {"wandb", "trackers"},
    "src/tracking/guard.py": {"wandb", "trackers"},
    "src/tracking/recorders.py": {"wandb", "trackers"},
    "tests/test_recorders.py": {"wandb", "trackers"},
}
"""Files that go with the last of several rooms."""
MARK = re.compile(r"(?m)^(.*?)  # room: ([\w+ ]+)\n")


def throw_out(rooms: set[str], project: Path) -> None:
    """Delete the files of the rooms, and the lines that only they need. Afterwards nothing else names them."""
    paths = [path for room in rooms for pattern in FILES[room].split() for path in project.glob(pattern)]
    paths += [project / path for path, of in SHARED.items() if not any(is_there(r, project) for r in of - rooms)]
    for path in paths:
        delete(path)
    for folder in (*project.glob("src/*"), project / "scripts"):
        left = {path.name for path in folder.glob("*")} - {"__pycache__", "__init__.py"}
        if folder.is_dir() and not left:
            delete(folder)
    for path in files(project):
        text = path.read_text()
        rest = MARK.sub(lambda line: kept(line[1], line[2].split(), rooms), text)
        if rest != text:
            path.write_text(re.sub("\n{4,}", "\n\n\n", rest))


def is_there(room: str, project: Path) -> bool:
    return any(True for pattern in FILES[room].split() for _ in project.glob(pattern))


def kept(code: str, names: list[str], gone: set[str]) -> str:
    """Return a marked line with the rooms that are left; nothing if none is."""
    left = [name for name in names if gone.isdisjoint(name.split("+"))]
    return f"{code}  # room: {' '.join(left)}\n" if left else ""


def files(project: Path) -> list[Path]:
    """Return the files that can have marked lines."""
    kinds = {".py", ".txt", ".toml", ".yml", ".yaml", ".mk", ""}
    found = [*project.glob("*"), *project.glob(".github/**/*")]
    for folder in ("src", "tests", "configs", "accelerate_configs"):
        found += project.glob(f"{folder}/**/*")
    return [path for path in found if path.suffix in kinds and path.is_file() and not path.is_symlink()]


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            delete(inner)
        path.rmdir()
    elif path.exists():
        path.unlink()


def main(names: list[str]) -> None:
    """Throw the rooms out of this project. Exit with code 2 if one is unknown, or what is deleted would be lost."""
    project = Path(__file__).resolve().parent.parent
    if unknown := [name for name in names if name not in FILES]:
        sys.stderr.write(f"rooms: no such room: {', '.join(unknown)} ({', '.join(FILES)})\n")
        sys.exit(2)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, text=True)
    if status.returncode or status.stdout:
        sys.stderr.write("rooms: commit your changes first, so that nothing is lost (git status)\n")
        sys.exit(2)
    throw_out(set(names), project)


if __name__ == "__main__":
    main(sys.argv[1:])
