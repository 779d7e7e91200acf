"""Models of a few kilobytes with random weights, as a folder and as a GGUF file."""

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def vocabulary() -> list[str]:
    """The special tokens, the 256 bytes as byte-level BPE writes them, and one merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab"]


def tiny_tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """A tokenizer with one token a byte, but for "ab"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary())}, merges=[("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
    )
    wrapped.chat_template = template
    return wrapped


def write_tiny_model(folder: Path, *, eos: int | list[int] | None = 2, **config: Any) -> Path:
    """A llama of two layers, as `save_pretrained` leaves it."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": len(vocabulary()),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
                "eos_token_id": eos,
                **config,
            }
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_tiny_gguf(
    file: Path, *, architecture: str = "llama", pre_tokenizer: str | None = None
) -> Path:
    """A llama of one layer in float32, or what has tensors of the same names."""
    import gguf
    import numpy as np

    random = np.random.default_rng(0)
    tokens = vocabulary()
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if pre_tokenizer is not None:
        writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)  # 3: control, 1: normal
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), 32)
    add("output_norm.weight", 32)
    add("output.weight", len(tokens), 32)
    for name, shape in {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }.items():
        add(f"blk.0.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
