"""A tokenizer without a vocabulary to learn or download: one token per byte of UTF-8."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes, `<|endoftext|>`, which begins and ends a document, and `<|pad|>`, with a plain
    chat template. What `save_pretrained` writes of it, `AutoTokenizer.from_pretrained` loads.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable character for each byte, as in GPT-2
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )
