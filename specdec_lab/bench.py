"""Speed of the parts on this machine, in one run with alternating arms: medians, and ratios with intervals."""

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch

from specdec_lab.decoding import Decoder
from specdec_lab.metrics import overhead_share, totals
from specdec_lab.models import zoo
from specdec_lab.provenance import provenance
from specdec_lab.statistics import ratio_interval
from specdec_lab.tasks import load_prompts
from specdec_lab.theory import measure_verify_curve
from specdec_lab.trace import now
from specdec_lab.verify import generate

TASKS = ("json", "code", "prose")


def bench(
    main: zoo.Main, reference: Any, prompts: int = 4, max_new_tokens: int = 64, report: Callable[[str], Any] = print
) -> dict[str, Any]:
    """Plain loop against transformers' generate, overhead, verify-cost curves, memory; JSON-able.

    prompts: of each task. reference: the main model as transformers has it.
    """
    loop = plain_loop(main, reference, prompts, max_new_tokens)
    report(
        f"plain loop over transformers.generate: {loop['ratio']:.2f}× ({loop['low']:.2f} … {loop['high']:.2f}, "
        f"{loop['prompts']} prompts), {loop['tokens_per_s']:.1f} against {loop['reference_tokens_per_s']:.1f} tokens/s"
    )
    report(f"time outside model forwards: {loop['overhead_share']:.1%} of the plain loop")
    curves = verify_curves(main, reference)
    report("tokens in one forward " + "".join(f"{k:>8}" for k in curves["k"]))
    for name in ("lean", "transformers"):
        report(f"{name + ', ms':22}" + "".join(f"{1e3 * s:8.1f}" for s in curves[name]))
    report("lean T(k) / T(1)      " + "".join(f"{s / curves['lean'][0]:8.2f}" for s in curves["lean"]))
    memory = {name: process_memory(name) for name in ("none", *zoo.RATIOS)}
    for name, sizes in memory.items():
        growth = "" if name == "none" else f"; held {sizes['held'] / memory['none']['held'] - 1:+.1%} over main alone"
        report(
            f"memory with draft {name}: " + ", ".join(f"{k} {v / 2**20:,.0f} MiB" for k, v in sizes.items()) + growth
        )
    return {
        "plain_loop": loop,
        "verify_curves": curves,
        "memory_bytes": memory,
        "machine": provenance(str(main.model.device)),
    }


def plain_loop(main: zoo.Main, reference: Any, prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Seconds of both on the same prompts, the prefill included, taking turns in being first."""
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    ids = [decoder.encode(row.prompt) for task in TASKS for row in load_prompts(task, prompts)]
    ours: list[float] = []
    theirs: list[float] = []
    counts: list[int] = []
    traces = []
    for index, prompt in enumerate([ids[0], *ids]):  # the first one warms up
        for mine in (True, False) if index % 2 else (False, True):
            start = now(main.model.device)
            if mine:
                made = decoder.generate(prompt, max_new_tokens=max_new_tokens)
            else:
                generate(reference, prompt, max_new_tokens, main.eos)
            if index:
                (ours if mine else theirs).append(now(main.model.device) - start)
        if index:
            traces.append(made.trace)
            counts.append(len(made.tokens))
    found = ratio_interval(theirs, ours)
    return {
        "ratio": found.value,
        "low": found.low,
        "high": found.high,
        "prompts": len(counts),
        "tokens_per_s": sum(counts) / sum(ours),
        "reference_tokens_per_s": sum(counts) / sum(theirs),
        "overhead_share": overhead_share(totals(traces)),
    }


def verify_curves(main: zoo.Main, reference: Any, context: int = 128, repeats: int = 9) -> dict[str, Any]:
    """Median seconds of a forward over k tokens behind `context` cached ones, of both implementations."""
    from transformers import DynamicCache

    lean = measure_verify_curve(main.model, context=context, repeats=repeats)
    ids = torch.arange(context, device=reference.device)[None]
    seconds: dict[int, list[float]] = {k: [] for k in lean.ks}
    with torch.inference_mode():
        cache = DynamicCache(config=reference.config)
        reference(ids, past_key_values=cache)
        for _ in range(repeats):
            for k in lean.ks:
                tokens = torch.arange(k, device=reference.device)[None]
                start = now(main.model.device)
                reference(tokens, past_key_values=cache)
                seconds[k].append(now(main.model.device) - start)
                cache.crop(-k)
    return {
        "k": list(lean.ks),
        "lean": list(lean.seconds),
        "transformers": [statistics.median(seconds[k]) for k in lean.ks],
    }


def process_memory(draft: str) -> dict[str, int]:
    """Bytes of a fresh process that decodes 64 tokens with that draft.

    held: weights and KV caches of both models. resident: of the process after decoding, libraries included; on CUDA
    the allocator's. peak: the same at its highest, which is while the main model's file is read.
    """
    code = f"from specdec_lab.bench import _decode_once; _decode_once({draft!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _decode_once(draft: str) -> None:
    main = zoo.load_main()
    prompt = load_prompts("code", 1)[0].prompt
    decoder = Decoder(main.model, zoo.load_drafter(draft, main), 4, main.tokenizer, eos=main.eos)
    held = decoder.generate(prompt, max_new_tokens=64).trace.memory_bytes
    if main.model.device.type == "cuda":
        resident, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    else:
        resident = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"held": held, "resident": resident, "peak": peak}))
