"""What a model's text is worth in each `DTYPE`, next to float32.

    python -m benchmarks.quality [--dtypes float32 bfloat16 int8] [--source bundled] [--json FILE]

`perplexity` is exp of the mean negative log likelihood of a text's tokens, each after all before it
(Jelinek et al., 1977); `likeliest_as_float32_percent` says how often the likeliest next token is
that of float32. The texts are this repository's own, so ratios tell, not the figures.
"""

import argparse
import gc
from pathlib import Path

import torch

from benchmarks.support.report import Row, finish
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.transformers_source import load_model

TEXTS = ("LICENSE", "README.md", "docs/architecture.md", "src/millstream/worker/job.py")
ROOT = Path(__file__).parents[1]
REFERENCE = "float32"


@torch.no_grad()
def measure(dtype: str, source: str, tokens: int) -> dict[str, tuple[float, torch.Tensor]]:
    """Of each text: its perplexity, and the likeliest token at each place."""
    loaded = load_model(EngineSettings(model=source, source=source, dtype=dtype, device="cpu"))
    told: dict[str, tuple[float, torch.Tensor]] = {}
    for name in TEXTS:
        ids = loaded.tokenizer((ROOT / name).read_text("utf-8"))["input_ids"][:tokens]
        logits = loaded.model(torch.tensor([ids])).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
        told[name] = loss.exp().item(), logits.argmax(dim=-1)
    return told


def run(options: argparse.Namespace) -> list[Row]:
    """Each dtype after the other; only one model is held at a time."""
    reference = measure(REFERENCE, options.source, options.tokens)
    rows: list[Row] = []
    for dtype in options.dtypes:
        gc.collect()
        told = reference
        if dtype != REFERENCE:
            told = measure(dtype, options.source, options.tokens)
        for name, (perplexity, likeliest) in told.items():
            other, as_there = reference[name]
            same = (likeliest == as_there).float().mean().item()
            rows.append(Row(f"millstream {dtype}", name, {
                "perplexity": perplexity,
                "over_float32": perplexity / other,
                "likeliest_as_float32_percent": 100 * same,
            }))  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--source", default="bundled", help="as MILLSTREAM_MODEL_SOURCE")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text, at most")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("quality", run(options), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
