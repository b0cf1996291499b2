"""`specdec-lab`: what the notebooks do, from a shell.

Options may be spelled with dashes or underscores. `--json` prints one JSON object as the last line of standard
output. Exit codes: 0 done, 1 failed with a message on standard error, 2 bad arguments, 130 interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_lab.errors import SettingError, SpecdecError, UnknownNameError

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    args = _parser().parse_args(words)
    try:
        _set_threads(args)
        result = args.run(args)
        if getattr(args, "json", False):
            print(json.dumps(result, ensure_ascii=False))
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (SettingError, UnknownNameError) as error:
        print(f"specdec-lab: {error}", file=sys.stderr)
        return 2
    except (SpecdecError, OSError) as error:
        print(f"specdec-lab: {error}", file=sys.stderr)
        return 1
    return 0


def _underscored(word: str) -> str:
    """--draft-length=4 → --draft_length=4."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _set_threads(args: argparse.Namespace) -> None:
    if getattr(args, "threads", None) is not None:
        import torch

        from specdec_lab.errors import require

        require("threads", args.threads, 1 <= args.threads <= 1024, "an integer 1 … 1024")
        torch.set_num_threads(args.threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec-lab", description="A workbench for speculative decoding.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        return sub

    models = command("models", _models, "list the models there are; `models fetch` gets the bundled one")
    models.add_argument("action", nargs="?", choices=("list", "fetch"), default="list")
    command("tasks", _tasks, "list the task types and their prompts")

    one = command("generate", _generate, "decode one prompt")
    one.add_argument("--prompt", required=True, help="text, or - for standard input")
    _decoding_options(one)
    one.add_argument("--stop", action="append", default=[], help="text that ends the output; may be repeated")

    many = command("evaluate", _evaluate, "decode many prompts, beside the plain loop on the same prompts")
    many.add_argument("--prompts", required=True, help="FILE.jsonl, or a task: json, code, prose, spec_bench …")
    many.add_argument("--limit", type=int, help="how many of them, evenly spread; default all")
    many.add_argument("--save_tokens", type=Path, help="write {id, tokens} lines, tokens as emitted")
    _decoding_options(many)

    sweep = command("sweep", _sweep, "run 03_ratio_sweep.ipynb: draft sizes x tasks x draft lengths, figures, table")
    sweep.add_argument("--main")
    sweep.add_argument("--drafts", nargs="+")
    sweep.add_argument("--tasks", nargs="+")
    sweep.add_argument("--draft_lengths", nargs="+", type=int)
    sweep.add_argument("--prompts", type=int, help="prompts of each task")
    sweep.add_argument("--max_new_tokens", type=int)
    sweep.add_argument("--temperature", type=float)
    sweep.add_argument("--seed", type=int)
    sweep.add_argument("--device", help="cpu or cuda; default CUDA where there is one")
    sweep.add_argument("--dtype", help="float32, bfloat16 or float16")
    sweep.add_argument("--threads", type=int)
    sweep.add_argument("--results", help="folder of the part files; a sweep that was killed resumes there")
    sweep.add_argument("--figures", help="folder of the figures")

    run = command("run", _run, "execute a notebook with parameters; unknown ones are refused")
    run.add_argument("notebook", help="02_experiment, 03_ratio_sweep, 08_distill_drafts, or a path")
    run.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="VALUE is YAML")
    run.add_argument("--out", help="the executed copy; default build/notebooks/<name>.ipynb")

    export = command("export", _export, "write `main` or a bundled draft as a Hugging Face folder")
    export.add_argument("name", help="main, 1:2, 1:3 or 1:4")
    export.add_argument("folder", type=Path)

    distill = command("distill", _distill, "train a draft of the bundled family; resumes where it stopped")
    distill.add_argument("--ratio", required=True, help="1:2, 1:3 or 1:4")
    distill.add_argument("--tokens", type=int, help="training tokens; default the recipe's")
    distill.add_argument("--folder", type=Path, help="hidden states and checkpoints; default in the cache folder")
    distill.add_argument(
        "--out", type=Path, help="folder the draft goes to; default data/models/<ratio>, for a trial the cache"
    )
    distill.add_argument("--threads", type=int)

    match = command("match", _match, "greedy match of the bundled drafts on evaluation prompts")
    match.add_argument("--drafts", nargs="+", default=["1:2", "1:3", "1:4"])
    match.add_argument("--prompts", type=int, default=20, help="prompts of each task")
    match.add_argument("--max_new_tokens", type=int, default=96)
    match.add_argument("--threads", type=int)

    verify = command("verify", _verify, "greedy output against transformers, token for token")
    verify.add_argument("--drafts", nargs="+", default=["1:2", "1:3", "1:4", "ngram"])
    verify.add_argument("--draft_lengths", nargs="+", type=int, default=[1, 4, 8])
    verify.add_argument("--prompts", type=int, default=20, help="prompts of each task")
    verify.add_argument("--max_new_tokens", type=int, default=64)
    verify.add_argument("--threads", type=int)

    bench = command("bench", _bench, "plain loop against transformers, overhead, verify-cost curve, memory")
    bench.add_argument("--prompts", type=int, default=4, help="prompts of each task")
    bench.add_argument("--max_new_tokens", type=int, default=64)
    bench.add_argument("--threads", type=int)
    return parser


def _decoding_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--main", default="bundled", help="bundled, a folder, a GGUF file or a hub id")
    sub.add_argument("--draft", default="1:4", help="1:2, 1:3, 1:4, ngram, none, a folder, a GGUF file or a hub id")
    sub.add_argument("--draft_length", type=int, default=4, help="tokens drafted a step; 0 is plain decoding")
    sub.add_argument("--max_new_tokens", type=int, default=128)
    sub.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sub.add_argument("--top_k", type=int, default=0)
    sub.add_argument("--top_p", type=float, default=1.0)
    sub.add_argument("--min_p", type=float, default=0.0)
    sub.add_argument("--repetition_penalty", type=float, default=1.0)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--device", help="cpu or cuda; default CUDA where there is one")
    sub.add_argument("--dtype", help="float32, bfloat16 or float16")
    sub.add_argument("--threads", type=int, help="CPU threads")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*SAMPLING, "max_new_tokens", "seed")}


def _decoders(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(zoo.Main, the decoder asked for, the plain one); settings are validated before a model loads."""
    from specdec_lab.decoding import MAX_DRAFT, Decoder
    from specdec_lab.errors import require
    from specdec_lab.models.zoo import load_drafter, load_main
    from specdec_lab.sampling import Sampling

    Sampling(**{name: getattr(args, name) for name in SAMPLING})
    require("max_new_tokens", args.max_new_tokens, args.max_new_tokens >= 1, "an integer >= 1")
    require("draft_length", args.draft_length, 0 <= args.draft_length <= MAX_DRAFT, f"0 … {MAX_DRAFT}")
    main_model = load_main(args.main, args.device, args.dtype)
    drafter = load_drafter(args.draft, main_model)
    plain = Decoder(main_model.model, tokenizer=main_model.tokenizer, eos=main_model.eos)
    drafting = Decoder(main_model.model, drafter, args.draft_length, main_model.tokenizer, eos=main_model.eos)
    return main_model, drafting, plain


def _models(args: argparse.Namespace) -> Any:
    from specdec_lab.models import zoo

    if args.action == "fetch":
        folder = zoo.fetch_bundled()
        _say(args, f"the bundled main model is in {folder}")
        return {"main": str(folder)}
    listed = zoo.listing()
    for name, about in listed.items():
        _say(args, f"{name:10} {about}")
    return listed


def _tasks(args: argparse.Namespace) -> Any:
    from specdec_lab.tasks import load_prompts, tasks

    listed = {}
    for name, spec in tasks().items():
        listed[name] = {"description": spec.description, "prompts": len(load_prompts(name)), "quality": spec.quality}
        _say(args, f"{name:16} {listed[name]['prompts']:5} prompts  {spec.description}; quality: {spec.quality}")
    return listed


def _generate(args: argparse.Namespace) -> Any:
    from specdec_lab.metrics import summarise

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    _, decoder, _ = _decoders(args)
    shown, made = "", None
    for made in decoder.stream(prompt, stop=args.stop, **_settings(args)):
        if not args.json and not made.text.endswith("\ufffd"):  # a character still in pieces
            print(made.text[len(shown) :], end="", flush=True)
            shown = made.text
    assert made is not None
    metrics = summarise([made.trace])
    if not args.json:
        print(made.text[len(shown) :])
        print(_line(metrics), file=sys.stderr)
    return {"text": made.text, "tokens": made.tokens, "metrics": metrics}


def _evaluate(args: argparse.Namespace) -> Any:
    from specdec_lab.experiment import alternate, encode_all, quality_of
    from specdec_lab.metrics import summarise
    from specdec_lab.tasks import load_prompts

    rows = load_prompts(args.prompts, args.limit)
    if args.save_tokens:
        args.save_tokens.write_text("")  # a place that cannot be written is told before a model loads
    main_model, decoder, plain = _decoders(args)
    settings, ids = _settings(args), encode_all(plain, rows)
    made: list[tuple[Any, Any]] = []  # (plain, drafting) generations
    interrupted = False
    try:
        for row, ((_, without), (_, drafted)) in zip(rows, alternate([plain, decoder], ids, **settings), strict=True):
            made.append((without, drafted))
            if sys.stderr.isatty():
                print(f"\r{len(made)} of {len(rows)}", end="", file=sys.stderr)
            if args.save_tokens:
                with open(args.save_tokens, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"id": row.id, "tokens": drafted.tokens}) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    done = rows[: len(made)]
    scores = [quality_of(main_model.model, row, ids[i], made[i][1]).value for i, row in enumerate(done)]

    def metrics_of(chosen: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = summarise([made[i][1].trace for i in chosen], [made[i][0].trace for i in chosen])
        known = [value for i in chosen if (value := scores[i]) is not None]
        return found | {"quality": sum(known) / len(known) if known else None, "scored": len(known)}

    names = dict.fromkeys(row.task for row in done)
    by_task = {name: metrics_of([i for i, row in enumerate(done) if row.task == name]) for name in names}
    overall = metrics_of(range(len(done)))
    if len(names) > 1:  # scores of different tasks have no common mean
        overall |= {"quality": None, "scored": 0}
    for name, metrics in {**by_task, "all": overall}.items():
        _say(args, f"{name:8} {_line(metrics)}")
    options = ("main", "draft", "prompts", "limit", *settings, "device", "dtype", "threads")
    about = {name: getattr(args, name) for name in options} | {"draft_length": decoder.draft_length}
    result = {"settings": about, "prompts": len(done), "metrics": overall, "by_task": by_task}
    if interrupted:
        if args.json:
            print(json.dumps(result | {"interrupted": True}, ensure_ascii=False))
        raise KeyboardInterrupt
    return result


def _sweep(args: argparse.Namespace) -> Any:
    from specdec_lab.experiment import grid
    from specdec_lab.notebooks import run_notebook

    names = ["main", "drafts", "tasks", "draft_lengths", "prompts", "max_new_tokens", "temperature", "seed"]
    names += ["device", "dtype", "threads", "results", "figures"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    # a notebook runs in the project's root
    given |= {name: _absolute(given[name]) for name in ("main", "drafts", "tasks") if name in given}
    given |= {name: str(Path(given[name]).expanduser().resolve()) for name in ("results", "figures") if name in given}
    if given:  # the figures of the default sweep are the ones README shows
        given.setdefault("figures", "build/figures")
    settings = {name: value for name, value in given.items() if name not in ("main", "results", "figures")}
    grid([given["main"]] if "main" in given else ("bundled",), **settings)  # told before a kernel starts
    out = run_notebook("03_ratio_sweep", given)
    _say(args, f"the notebook with its results is {out}")
    return {"notebook": str(out)}


def _absolute(names: Any) -> Any:
    """The names, those of files and folders made absolute."""
    if isinstance(names, list):
        return [_absolute(name) for name in names]
    path = Path(names).expanduser()
    return str(path.resolve()) if path.exists() else names


def _run(args: argparse.Namespace) -> Any:
    import yaml

    from specdec_lab.notebooks import run_notebook

    out = run_notebook(args.notebook, {name: yaml.safe_load(value) for name, value in args.p}, args.out)
    _say(args, f"the executed notebook is {out}")
    return {"notebook": str(out)}


def _export(args: argparse.Namespace) -> Any:
    from specdec_lab.models.zoo import export

    export(args.name, args.folder)
    _say(args, f"{args.name} is in {args.folder}, for transformers to load")
    return {"folder": str(args.folder)}


def _distill(args: argparse.Namespace) -> Any:
    from specdec_lab.distill import distill

    history = distill(
        args.ratio, args.folder, args.out, args.tokens, report=lambda line: print(line, file=sys.stderr, flush=True)
    )
    return {"ratio": args.ratio, "history": history}


def _match(args: argparse.Namespace) -> Any:
    from specdec_lab.distill import greedy_completions, greedy_match
    from specdec_lab.drafting import DraftModel
    from specdec_lab.errors import require
    from specdec_lab.models.zoo import RATIOS, load_drafter, load_main

    require("drafts", args.drafts, set(args.drafts) <= set(RATIOS), f"of {', '.join(RATIOS)}")
    require("prompts", args.prompts, args.prompts >= 1, "an integer >= 1")
    main_model, found = load_main(), []
    drafters = {name: load_drafter(name, main_model) for name in args.drafts}
    for task in ("json", "code", "prose"):
        completions = greedy_completions(main_model, task, args.prompts, args.max_new_tokens)
        for name, drafter in drafters.items():
            assert isinstance(drafter, DraftModel)
            got = greedy_match(drafter.model, completions)
            _say(args, f"{name} {task:6} {got.value:.3f} ({got.low:.3f} … {got.high:.3f}, {got.prompts} prompts)")
            found.append({"draft": name, "task": task, "match": got.value, "low": got.low, "high": got.high})
    return {"match": found}


def _verify(args: argparse.Namespace) -> Any:
    from tqdm import tqdm

    from specdec_lab.models.zoo import fetch_bundled, load_main, read
    from specdec_lab.verify import table, verify

    main_model, (reference, _) = load_main(device="cpu", dtype="float32"), read(fetch_bundled())
    total = 3 * args.prompts * (1 + len(args.drafts) * len(args.draft_lengths))
    with tqdm(total=total, unit="text", mininterval=5, file=sys.stderr) as bar:
        checks = verify(
            main_model,
            reference,
            args.drafts,
            args.draft_lengths,
            prompts=args.prompts,
            max_new_tokens=args.max_new_tokens,
            tick=bar.update,
        )
    _say(args, table(checks))
    wrong = [check for check in checks if check.verdict == "WRONG"]
    if wrong:
        raise SpecdecError(f"{len(wrong)} of {len(checks)} texts differ from transformers where it is not undecided")
    return {"texts": len(checks), "ties": sum(check.verdict == "tie" for check in checks)}


def _bench(args: argparse.Namespace) -> Any:
    from specdec_lab.bench import bench
    from specdec_lab.models.zoo import fetch_bundled, load_main, read

    main_model, (reference, _) = load_main(), read(fetch_bundled())
    reference = reference.to(device=main_model.model.device, dtype=main_model.model.dtype)
    result = bench(main_model, reference, args.prompts, args.max_new_tokens, lambda line: _say(args, line))
    if not args.json:
        print(json.dumps(result))
    return result


def _say(args: argparse.Namespace, line: str) -> None:
    """A line for people: on standard output, or on standard error where that belongs to JSON."""
    print(line, file=sys.stderr if args.json else sys.stdout, flush=True)


def _line(metrics: dict[str, Any]) -> str:
    shown = {
        "speculative_speedup": "speed-up {:.2f}×",
        "throughput": "{:.1f} tokens/s",
        "acceptance_probability": "α {:.3f}",
        "draft_acceptance_rate": "accepted/drafted {:.3f}",
        "tokens_per_main_forward": "τ {:.2f}",
        "draft_cost_ratio": "c {:.3f}",
        "coverage": "coverage {:.2f}",
    }
    return ", ".join(text.format(metrics[name]) for name, text in shown.items() if metrics[name] is not None)
