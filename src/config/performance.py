"""The setting of the profiler; src/tracking/performance.py starts it."""

import re
from collections.abc import Iterator

from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class PerformanceSettings(RunSettings):
    """Adds profiles of chosen steps."""

    profile_steps: ResumeSafe[str | None] = None
    """First and last step to profile, such as 10:15, into output_dir/profile; null: none."""

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        profiled = re.fullmatch(r"([1-9]\d*):(\d+)", self.profile_steps or "1:1")
        if not profiled or int(profiled[1]) > int(profiled[2]):
            yield f"profile_steps={self.profile_steps}: name the first and the last step, such as 10:15"

    def length_errors(self, examples: int) -> Iterator[str]:
        yield from super().length_errors(examples)
        steps, total = self.profile_steps, self.total_steps(examples)
        if steps and int(steps.partition(":")[0]) > total:
            yield f"profile_steps={steps}: the run has only {total} steps; choose among them, or set it to null"
