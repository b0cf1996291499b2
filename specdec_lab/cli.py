"""`specdec-lab`: what the notebooks do, from a shell.

Options may be spelled with dashes or underscores. `--json` prints one JSON object as the last line of standard
output. Exit codes: 0 done, 1 failed with a message on standard error, 2 bad arguments, 130 interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specdec_lab.errors import DataError, SettingError, SpecdecError, UnknownNameError, require

AGREEMENT = {"match": "greedy match", "overlap": "Σ min(p, q)", "alpha": "α"}
KEPT = {  # by commands that are interrupted; `evaluate` says for itself
    "sweep": "the parts that were finished are kept, and the same command goes on after them",
    "grid": "the parts that were finished are kept, and the same command goes on after them",
    "distill": "hidden states and checkpoints so far are kept, and the same command goes on from them",
    **dict.fromkeys(("bench", "study", "match", "verify", "assess"), "nothing is kept"),
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run one command; returns the exit code. parser: of another command line that sets `run` and `command`."""
    words = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    args = (parser or _parser()).parse_args(words)
    try:
        _set_threads(args)
        result = args.run(args)
        if getattr(args, "json", False) and result is not None:
            print(json.dumps(result, ensure_ascii=False))
    except KeyboardInterrupt as stop:
        kept = str(stop) or KEPT.get(args.command)
        print(f"interrupted; {kept}" if kept else "interrupted", file=sys.stderr)
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
    one.add_argument("--task", help="the prompt's task type, for --profile: json, code, prose …")
    _decoding_options(one)
    _constraint_options(one, "FILE or any")
    one.add_argument("--stop", action="append", default=[], help="text that ends the output; may be repeated")

    many = command("evaluate", _evaluate, "decode many prompts, beside the plain loop on the same prompts")
    many.add_argument("--prompts", required=True, help="FILE.jsonl, or a task: json, code, prose, spec_bench …")
    many.add_argument("--limit", type=int, help="how many of them, evenly spread; default all")
    many.add_argument("--save_tokens", type=Path, help="write {id, tokens} lines, tokens as emitted")
    _decoding_options(many)
    _constraint_options(many, "FILE, any, or auto: each row's own schema, any JSON for rows without")

    assess = command(
        "assess", _assess, "does drafting pay for these prompts? predicted from a short probe, with reasons"
    )
    assess.add_argument("--prompts", required=True, nargs="+", help="FILE.jsonl, or tasks: json, code, prose …")
    assess.add_argument("--limit", type=int, default=8, help="prompts of each that are probed, evenly spread")
    assess.add_argument("--main", default="bundled", help="bundled, a folder, a GGUF file or a hub id")
    assess.add_argument("--drafts", nargs="+", help="default 1:2 1:4 ngram feature; for another main model ngram")
    assess.add_argument("--draft_lengths", nargs="+", type=int, help="predicted; the longest is probed; default 1 … 12")
    assess.add_argument("--output_tokens", type=int, help="how many you mean to generate; default max_new_tokens")
    assess.add_argument(
        "--check",
        nargs="*",
        type=int,
        metavar="LENGTH",
        help="score the predictions on other prompts, at these draft lengths; default 2 4",
    )
    _running_options(assess, max_new_tokens=40)

    sweep = command("sweep", _sweep, "run 03_ratio_sweep.ipynb: draft sizes x tasks x draft lengths, figures, table")
    sweep.add_argument("--drafts", nargs="+")
    sweep.add_argument("--prompts", type=int, help="prompts of each task")
    _notebook_options(sweep)

    grid = command("grid", _grid, "run 04_threshold_grid.ipynb: draft lengths x candidates x rules x thresholds")
    grid.add_argument("--draft")
    grid.add_argument("--candidate_counts", nargs="+", type=int)
    grid.add_argument("--rules", nargs="+", help="lossless, threshold, typical, lenience, block, sequence")
    grid.add_argument("--thresholds", nargs="+", type=float)
    grid.add_argument("--max_retries", type=int)
    grid.add_argument("--prompts", nargs="+", type=int, help="prompts of each task, for each round")
    grid.add_argument("--keep", nargs="*", type=int, help="settings of a task that go on after each round but the last")
    grid.add_argument("--full", action="store_true", default=None, help="the articles' whole grid; about a day")
    _notebook_options(grid)

    report = command("report", _report, "run 09_report.ipynb: the articles' claims beside what was measured, as HTML")
    report.add_argument("--sweep", help="folder that `sweep` filled")
    report.add_argument("--grid", help="folder that `grid` filled")
    report.add_argument("--bench", help="file that `bench --readme` wrote")
    report.add_argument("--draft_length", type=int, help="of the articles' example; default 16")
    report.add_argument("--candidate_count", type=int, help="of the articles' example; default 4")
    report.add_argument("--tries", type=int, help="of a whole text; default 3")
    report.add_argument("--figures", help="folder of the figures")
    report.add_argument("--html", help="the page; default build/report.html")

    run = command("run", _run, "execute a notebook with parameters; unknown ones are refused")
    run.add_argument(
        "notebook", help="02_experiment, 03_ratio_sweep, 04_threshold_grid, 08_distill_drafts, 09_report, or a path"
    )
    run.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="VALUE is YAML")
    run.add_argument("--out", help="the executed copy; default build/notebooks/<name>.ipynb")

    abroad = command("elsewhere", _elsewhere, "print a setting as transformers, vLLM and llama.cpp spell it")
    abroad.add_argument("systems", nargs="*", metavar="SYSTEM", help="transformers, vllm, llama.cpp; default all")
    abroad.add_argument("--task", help="the task type, for --profile: json, code, prose …")
    _decoding_options(abroad)

    export = command("export", _export, "write `main` or a bundled draft as a Hugging Face folder")
    export.add_argument("name", help="main, 1:2, 1:3 or 1:4")
    export.add_argument("folder", type=Path)

    distill = command("distill", _distill, "train a draft of the bundled family; resumes where it stopped")
    distill.add_argument("--ratio", required=True, help="1:2, 1:3, 1:4, feature or parallel")
    distill.add_argument("--tokens", type=int, help="training tokens; default the recipe's")
    distill.add_argument("--folder", type=Path, help="hidden states and checkpoints; default in the cache folder")
    distill.add_argument(
        "--out", type=Path, help="folder the draft goes to; default data/models/<ratio>, for a trial the cache"
    )
    distill.add_argument("--threads", type=int)

    match = command("match", _match, "agreement of drafts with the main model, and their α, on evaluation prompts")
    match.add_argument("--drafts", nargs="+", help="default every bundled draft that is there, and ngram")
    match.add_argument("--draft_length", type=int, default=4, help="of the decoding that α is measured in")
    match.add_argument("--prompts", type=int, default=20, help="prompts of each task")
    match.add_argument("--max_new_tokens", type=int, default=96)
    match.add_argument("--threads", type=int)

    study = command("study", _study, "speed-up and α over prompt length, or over the position in the output")
    study.add_argument("what", choices=("lengths", "positions"))
    study.add_argument("--drafts", nargs="+", help="default 1:4 ngram fastest")
    study.add_argument("--tasks", nargs="+", help="default json code prose")
    study.add_argument("--prompts", type=int, help="prompts of each task; default 6, for positions 12")
    study.add_argument("--max_new_tokens", type=int, help="default 64, for positions 256")
    study.add_argument("--lengths", nargs="+", type=int, help="of prompts, in tokens; default 64 128 … 2048")
    study.add_argument("--width", type=int, help="tokens that one position stands for; default 16")
    study.add_argument(
        "--results", help="folder of parquet and JSON; default data/results, other settings build/results"
    )
    study.add_argument("--figures", help="folder of the figure; default figures, other settings build/figures")
    study.add_argument("--threads", type=int)

    verify = command("verify", _verify, "greedy output against transformers, token for token")
    verify.add_argument("--drafts", nargs="+", default=["1:2", "1:3", "1:4", "ngram"])
    verify.add_argument("--draft_lengths", nargs="+", type=int, default=[1, 4, 8])
    verify.add_argument("--prompts", type=int, default=20, help="prompts of each task")
    verify.add_argument("--max_new_tokens", type=int, default=64)
    verify.add_argument("--threads", type=int)

    bench = command("bench", _bench, "every arm and other systems in one run; last line JSON, always")
    bench.add_argument("--tasks", nargs="+", help="default json code prose; spec_bench runs each of its categories")
    bench.add_argument("--arms", nargs="+", help="which ways to decode, besides the plain loop; default all")
    bench.add_argument("--prompts", type=int, help="prompts of each task; default 10")
    bench.add_argument("--max_new_tokens", type=int, help="default 64")
    bench.add_argument("--temperature", type=float, help="of the sampled part; default 0.2, 0 leaves it out")
    bench.add_argument("--top_p", type=float, help="of the sampled part; default 0.9")
    bench.add_argument("--seed", type=int)
    bench.add_argument("--readme", action="store_true", help="write data/results/bench.json and the table in README.md")
    bench.add_argument("--threads", type=int)
    return parser


def _notebook_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--main")
    sub.add_argument("--tasks", nargs="+")
    sub.add_argument("--draft_lengths", nargs="+", type=int)
    sub.add_argument("--max_new_tokens", type=int)
    sub.add_argument("--temperature", type=float)
    sub.add_argument("--seed", type=int)
    sub.add_argument("--device", help="cpu or cuda; default CUDA where there is one")
    sub.add_argument("--dtype", help="float32, bfloat16 or float16")
    sub.add_argument("--threads", type=int)
    sub.add_argument("--results", help="folder of the part files; what was killed resumes there")
    sub.add_argument("--figures", help="folder of the figures")


def _decoding_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--main", default="bundled", help="bundled, a folder, a GGUF file or a hub id")
    sub.add_argument("--draft", help="a name that `models` lists; default 1:4")
    sub.add_argument("--draft_length", type=int, help="tokens drafted a step; 0 is plain decoding; default 4")
    sub.add_argument("--profile", help="draft and draft_length by task, from profiles.toml: fastest")
    sub.add_argument("--candidate_count", type=int, default=1, help="candidates a step, 1 … 8, merged into one tree")
    sub.add_argument("--branching", help="how candidates part: dynamic, top_k, distinct, chains (default of block)")
    sub.add_argument(
        "--acceptance_rule", default="lossless", help="lossless, threshold, typical, lenience, block or sequence"
    )
    sub.add_argument("--acceptance_threshold", type=float, help="0 … 1, of every rule but lossless")
    sub.add_argument("--max_retries", type=int, help="of block and sequence: how often a refused draft is drawn anew")
    sub.add_argument("--draft_temperature", type=float, help="of block and sequence: what drafts are drawn at")
    sub.add_argument("--adaptive_threshold", type=float, help="more candidates while verification succeeds so often")
    _running_options(sub)


def _running_options(sub: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    """Options of an output, however it is drafted."""
    sub.add_argument("--max_new_tokens", type=int, default=max_new_tokens)
    sub.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sub.add_argument("--top_k", type=int, default=0)
    sub.add_argument("--top_p", type=float, default=1.0)
    sub.add_argument("--min_p", type=float, default=0.0)
    sub.add_argument("--repetition_penalty", type=float, default=1.0)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--device", help="cpu or cuda; default CUDA where there is one")
    sub.add_argument("--dtype", help="float32, bfloat16, float16; packed_bf16: on a CPU, faster, other logits")
    sub.add_argument("--threads", type=int, help="CPU threads")


def _constraint_options(sub: argparse.ArgumentParser, schemas: str) -> None:
    only = sub.add_mutually_exclusive_group()
    only.add_argument("--json_schema", help=f"constrain the output to a JSON schema: {schemas}")
    only.add_argument("--regex", help="constrain the output to a regular expression, in Rust's syntax")
    only.add_argument("--grammar", type=Path, help="constrain the output to the Lark grammar in this file")


def _source(args: argparse.Namespace) -> Any:
    """The constrain.Source that the options ask for, None without; read and checked before a model loads."""
    if args.json_schema is None and args.regex is None and args.grammar is None:
        return None
    from specdec_lab.constrain import Source, read_lark, read_schema

    if args.regex is not None:
        return Source.regex(args.regex)
    if args.grammar is not None:
        return read_lark(args.grammar)
    return Source.any_json() if args.json_schema == "any" else read_schema(Path(args.json_schema))


def _grammars(
    args: argparse.Namespace, source: Any, rows: Sequence[Any], main_model: Any
) -> tuple[list[tuple[Any, Any]], dict[str, str]]:
    """([(row, constrain.Grammar or None)], why the schema of a row cannot be used, by the row's id)."""
    if args.json_schema != "auto":
        grammar = _compiled(args, source, main_model)
        return [(row, grammar) for row in rows], {}
    from specdec_lab.constrain import Source

    usable, refused = [], {}
    for row in rows:
        try:
            name = f"prompt {row.id}"
            own = Source.any_json() if row.schema is None else Source.json_schema(row.schema, name)
            usable.append((row, _compiled(args, own, main_model)))
        except DataError as error:
            refused[row.id] = str(error)
            print(f"specdec-lab: skipped: {error}", file=sys.stderr)
    if not usable:
        raise DataError(f"{args.prompts}: no row has a schema that can be used")
    return usable, refused


def _compiled(args: argparse.Namespace, source: Any, main_model: Any) -> Any:
    """The constrain.Grammar of a Source for that model's tokenizer; None of None."""
    from specdec_lab.constrain import Grammar

    if source is None:
        return None
    grammar = Grammar(source, main_model.tokenizer)
    grammar.require_room(args.max_new_tokens)  # told before the first row is decoded
    return grammar


def _valid(row: Any, grammar: Any, made: Any, eos: Sequence[int]) -> bool | None:
    """Whether the output is what was asked for; None where nothing was. A JSON schema is checked by jsonschema.

    Unconstrained JSON is held to the row's own schema. What a length limit cut counts as it stands.
    Raises DataError for a schema that jsonschema cannot use.
    """
    from specdec_lab.tasks.scores import json_score

    if grammar is not None and grammar.source.schema is None:
        return bool(grammar.matches([token for token in made.tokens if token not in eos]))
    if grammar is None and row.task != "json":
        return None
    schema = row.schema if grammar is None else grammar.source.schema
    asked = replace(row, schema=schema if isinstance(schema, dict) else None)
    return json_score(asked, made.text, None, None).value == 1.0


def _or_none(check: Callable[..., Any], *values: Any) -> Any:
    """What the check returns; None, told on standard error, where it raises DataError.

    The grammar's library takes schemas that jsonschema does not, as those with \\p{L}; the rest is worth keeping.
    """
    try:
        return check(*values)
    except DataError as error:
        print(f"specdec-lab: not scored: {error}", file=sys.stderr)
        return None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*SAMPLING, "max_new_tokens", "seed")}


def _drafting(args: argparse.Namespace, task: str | None) -> Any:
    """The profiles.Drafting that the options ask for, for a prompt of that task; raises SettingError."""
    from specdec_lab.profiles import Drafting, load_profile

    if args.profile is None:
        return Drafting(args.draft or "1:4", 4 if args.draft_length is None else args.draft_length)
    if args.draft is not None or args.draft_length is not None:
        raise SettingError("profile", args.profile, "none beside --draft and --draft_length, which a profile sets")
    return load_profile(args.profile).for_task(task)


def _arm(args: argparse.Namespace, drafting: Any) -> Any:
    """The experiment.Arm of the options with a profiles.Drafting; raises SettingError."""
    from specdec_lab.experiment import Arm

    named = ("candidate_count", "acceptance_rule", "acceptance_threshold", "max_retries", "draft_temperature")
    given = {name: getattr(args, name) for name in (*named, "adaptive_threshold")}
    if args.branching is not None:
        alone = args.candidate_count == 1 and args.adaptive_threshold is None
        require("branching", args.branching, not alone, "none without --candidate_count or --adaptive_threshold")
        given["branching"] = args.branching
    plain = drafting.draft == "none"
    draft, length = ("ngram", 0) if plain else (drafting.draft, drafting.draft_length)
    arm = Arm(draft, length, **given)
    arm.acceptance.require_temperature(args.temperature)
    return arm


def _decoders(args: argparse.Namespace, drafting: Sequence[Any]) -> tuple[Any, list[Any], Any]:
    """(zoo.Main, a decoder for each profiles.Drafting, the plain one); settings are validated before a model loads.

    What drafts with the same model shares it, so that those decoders take turns.
    """
    from specdec_lab.decoding import Decoder
    from specdec_lab.models.zoo import load_drafter, load_main
    from specdec_lab.sampling import Sampling

    Sampling(**{name: getattr(args, name) for name in SAMPLING})
    arms = [_arm(args, each) for each in drafting]
    require("max_new_tokens", args.max_new_tokens, args.max_new_tokens >= 1, "an integer >= 1")
    main_model = load_main(args.main, args.device, args.dtype)
    drafters: dict[str, Any] = {}
    decoders = []
    for each, arm in zip(drafting, arms, strict=True):
        options = {**each.options, **arm.options}
        key = json.dumps([each.draft, options], sort_keys=True)
        drafters[key] = drafters.get(key) or load_drafter(each.draft, main_model, **options)
        decoders.append(arm.decoder(main_model, drafters[key]))
    plain = Decoder(main_model.model, tokenizer=main_model.tokenizer, eos=main_model.eos)
    return main_model, decoders, plain


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

    if args.json_schema == "auto":
        raise SettingError("json_schema", "auto", "FILE or any; only the rows that `evaluate` reads have schemas")
    if args.task is not None and args.profile is None:
        raise SettingError("task", args.task, "none without --profile")
    source = _source(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    main_model, (decoder,), _ = _decoders(args, [_drafting(args, args.task)])
    grammar = _compiled(args, source, main_model)
    shown, made = "", None
    for made in decoder.stream(prompt, stop=args.stop, constraint=grammar, **_settings(args)):
        if not args.json and not made.text.endswith("\ufffd"):  # a character still in pieces
            print(made.text[len(shown) :], end="", flush=True)
            shown = made.text
    assert made is not None
    metrics = summarise([made.trace])
    if not args.json:
        print(made.text[len(shown) :])
        print(_line(metrics), file=sys.stderr)
    result = {"text": made.text, "tokens": made.tokens, "metrics": metrics}
    if grammar is not None:
        result["valid"] = grammar.matches([token for token in made.tokens if token not in decoder.eos])
        if not result["valid"]:
            where = {"length": f"max_new_tokens = {args.max_new_tokens}", "context": "the end of the model's context"}
            cut = where.get(made.trace.finish, "a stop string")
            print(f"specdec-lab: the output ends at {cut}, before {grammar.name} is satisfied", file=sys.stderr)
    return result


def _evaluate(args: argparse.Namespace) -> Any:
    from specdec_lab.errors import require_writable
    from specdec_lab.experiment import alternate, encode_all
    from specdec_lab.metrics import LOOP, loops, summarise
    from specdec_lab.tasks import load_prompts

    rows = load_prompts(args.prompts, args.limit)
    drafting = {task: _drafting(args, task) for task in dict.fromkeys(row.task for row in rows)}
    ways: list[Any] = []  # those of them that differ
    for each in drafting.values():
        if each not in ways:
            ways.append(each)
    source = None if args.json_schema == "auto" else _source(args)
    if args.save_tokens:
        require_writable(args.save_tokens)  # told before a model loads
    main_model, decoders, plain = _decoders(args, ways)
    usable, refused = _grammars(args, source, rows, main_model)
    rows, grammars = [row for row, _ in usable], [grammar for _, grammar in usable]
    settings, ids = _settings(args), encode_all(plain, rows)
    way_of = {task: ways.index(each) for task, each in drafting.items()}
    sides = []  # for each way, an iterator over its rows
    for way, decoder in enumerate(decoders):
        mine = [i for i, row in enumerate(rows) if way_of[row.task] == way]
        theirs = {"constraints": [grammars[i] for i in mine], **settings}
        sides.append(alternate([plain, decoder], [ids[i] for i in mine], **theirs))
    made: list[tuple[Any, Any]] = []  # (plain, drafting) generations
    interrupted = False
    try:
        for row in rows:
            (_, without), (_, drafted) = next(sides[way_of[row.task]])
            made.append((without, drafted))
            if sys.stderr.isatty():
                print(f"\r{len(made)} of {len(rows)}", end="", file=sys.stderr)
            if args.save_tokens:
                mode = "w" if len(made) == 1 else "a"  # an earlier run's stay until there are new ones
                with open(args.save_tokens, mode, encoding="utf-8") as file:
                    file.write(json.dumps({"id": row.id, "tokens": drafted.tokens}) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    done, lossy = rows[: len(made)], args.acceptance_rule != "lossless"
    table = _judged(main_model.model, done, ids, made)
    valid = [_or_none(_valid, row, grammars[i], made[i][1], plain.eos) for i, row in enumerate(done)]

    def metrics_of(chosen: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = summarise([made[i][1].trace for i in chosen], [made[i][0].trace for i in chosen])
        known = table.quality.iloc[list(chosen)].dropna()
        found |= {"quality": float(known.mean()) if len(known) else None, "scored": len(known)}
        found |= _changes(table.iloc[list(chosen)])
        held = [answer for i in chosen if (answer := valid[i]) is not None]
        found |= _speedup_interval([(made[i][1].trace, made[i][0].trace) for i in chosen])
        return found | {"valid_share": sum(held) / len(held) if held else None}

    def metrics_by_task(chosen: Sequence[int]) -> dict[str, Any]:
        names = dict.fromkeys(row.task for row in done)
        by_task = {name: metrics_of([i for i in chosen if done[i].task == name]) for name in names}
        overall = metrics_of(chosen)
        if len(names) > 1:  # scores of different tasks have no common mean
            overall |= {"quality": None, "scored": 0, "quality_prompts": 0}
            overall |= dict.fromkeys(("quality_delta", "quality_delta_low", "quality_delta_high"))
        return {"prompts": len(chosen), "metrics": overall, "by_task": by_task}

    everything = metrics_by_task(range(len(done)))
    loop_free = metrics_by_task([i for i, (without, _) in enumerate(made) if not loops(without.tokens)])
    for name, metrics in {**everything["by_task"], "all": everything["metrics"]}.items():
        _say(args, f"{name:8} {_line(metrics, lossy)}")
    _say(
        args,
        f"without the {len(done) - loop_free['prompts']} prompts whose plain output loops ({LOOP:.0%} of 4-grams):",
    )
    for name, metrics in {**loop_free["by_task"], "all": loop_free["metrics"]}.items():
        _say(args, f"{name:8} {_line(metrics, lossy)}")
    options = ("main", "profile", "prompts", "limit", *settings, "device", "dtype", "threads")
    about = {**asdict(_arm(args, next(iter(drafting.values())))), **{name: getattr(args, name) for name in options}}
    used = {  # plain decoding has no length
        task: {**asdict(each), "draft_length": decoders[way_of[task]].draft_length} for task, each in drafting.items()
    }
    everywhere = next(iter(used.values())) if args.profile is None else {}  # a profile's differ by task
    about |= {"draft": everywhere.get("draft"), "draft_length": everywhere.get("draft_length"), "drafting": used}
    about |= {"json_schema": args.json_schema, "regex": args.regex, "grammar": args.grammar and str(args.grammar)}
    result = {"settings": about, **everything, "loop_free": loop_free, "skipped": refused}
    if interrupted:
        if args.json:
            print(json.dumps(result | {"interrupted": True}, ensure_ascii=False))
        saved = f", whose tokens are in {args.save_tokens}" if args.save_tokens and done else ""
        raise KeyboardInterrupt(f"the numbers are of the {len(done)} prompts that were finished{saved}")
    return result


def _assess(args: argparse.Namespace) -> Any:
    from dataclasses import replace

    from specdec_lab.assess import CHECKED, Plan, lines, require_unprobed, score_dict, score_lines, to_dict, unsuitable
    from specdec_lab.errors import ArchitectureError, require
    from specdec_lab.models.zoo import load_main
    from specdec_lab.sampling import Sampling

    require("prompts", args.prompts, len(set(args.prompts)) == len(args.prompts), "different files or tasks")
    given = {name: tuple(value) for name in ("drafts", "draft_lengths") if (value := getattr(args, name))}
    if args.main != "bundled":
        given.setdefault("drafts", ("ngram",))
    sampling = Sampling(**{name: getattr(args, name) for name in SAMPLING})
    plan = Plan(
        max_new_tokens=args.max_new_tokens,
        output_tokens=args.output_tokens,
        sampling=sampling,
        seed=args.seed,
        **given,
    )
    checked = None if args.check is None else tuple(args.check or CHECKED)
    if checked is not None:
        plan = replace(plan, draft_lengths=tuple(sorted({*plan.draft_lengths, *checked})))
        require_unprobed(plan, checked)
    sets = _probe_sets(args, checked is not None)
    try:
        main_model = load_main(args.main, args.device, args.dtype)
    except ArchitectureError as error:
        _say(args, f"don't use drafting with {args.main}: {unsuitable(error)}")
        return {"main": args.main, "assessments": [], "exclusions": [unsuitable(error)]}
    found, scored = _assessments(args, main_model, plan, sets, checked)
    for each in found:
        _say(args, "\n".join([*lines(each), ""]))
    result = {"main": args.main, "assessments": [to_dict(each) for each in found]}
    if checked is not None:
        _say(args, "\n".join(score_lines(scored)))
        result["check"] = score_dict(scored)
    return result


def _probe_sets(args: argparse.Namespace, checked: bool) -> dict[str, tuple[list[Any], list[Any]]]:
    """Prompts to probe, and to score predictions on, by name of the set; raises DataError where there are too few."""
    from specdec_lab.assess import split
    from specdec_lab.tasks import load_prompts

    return {
        name: split(load_prompts(name), args.limit) if checked else (load_prompts(name, args.limit), [])
        for name in args.prompts
    }


def _assessments(
    args: argparse.Namespace,
    main_model: Any,
    plan: Any,
    sets: dict[str, tuple[list[Any], list[Any]]],
    checked: Sequence[int] | None,
) -> tuple[list[Any], list[Any]]:
    """The assessment of every set of prompts, and the scored predictions where they are checked."""
    from tqdm import tqdm

    from specdec_lab.assess import assess, load_drafts, score_predictions
    from specdec_lab.experiment import encode_all
    from specdec_lab.theory import measure_verify_curve

    for probe, others in sets.values():
        encode_all(_plain(main_model), [*probe, *others])  # what does not fit is told before anything is decoded
    drafters = load_drafts(plan.drafts, main_model)
    curve = measure_verify_curve(main_model.model, context=min(128, main_model.model.context_length // 2))
    arms, found, scored = len(drafters[0]), list[Any](), list[Any]()
    total = sum(len(probe) * (1 + arms) for probe, _ in sets.values())
    total += sum(len(others) * (1 + arms * len(checked or ())) for _, others in sets.values())
    with tqdm(total=total, unit="text", mininterval=5, file=sys.stderr) as bar:
        for name, (probe, others) in sets.items():
            given: dict[str, Any] = {"name": name, "drafters": drafters, "curve": curve, "tick": bar.update}
            found.append(assess(main_model, probe, plan, **given))
            if checked is not None:
                scored += score_predictions(
                    main_model, found[-1], others, checked, drafters=drafters[0], tick=bar.update
                )
    return found, scored


def _sweep(args: argparse.Namespace) -> Any:
    from specdec_lab.experiment import grid

    given = _notebook_settings(args)
    settings = {name: value for name, value in given.items() if name not in ("main", "results", "figures")}
    grid([given["main"]] if "main" in given else ("bundled",), **settings)  # told before a kernel starts
    return _run_notebook(args, "03_ratio_sweep", given)


def _grid(args: argparse.Namespace) -> Any:
    from specdec_lab.tuning import Search

    given = _notebook_settings(args)
    Search(**{name: value for name, value in given.items() if name not in ("results", "figures")})
    return _run_notebook(args, "04_threshold_grid", given)


def _report(args: argparse.Namespace) -> Any:
    from specdec_lab.claims import Example

    given = _notebook_settings(args)
    Example(**{name: given[name] for name in ("draft_length", "candidate_count", "tries") if name in given})
    return _run_notebook(args, "09_report", given)


def _notebook_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given, files and folders absolute, as a notebook runs in the project's root."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    given = {name: value for name, value in given.items() if name not in ("command", "run", "json")}
    given |= {name: _absolute(given[name]) for name in ("main", "draft", "drafts", "tasks") if name in given}
    paths = ("results", "figures", "sweep", "grid", "bench", "html")
    given |= {name: str(Path(given[name]).expanduser().resolve()) for name in paths if name in given}
    if given:  # the figures of a default run are the ones README shows
        given.setdefault("figures", "build/figures")
    return given


def _run_notebook(args: argparse.Namespace, name: str, given: dict[str, Any]) -> Any:
    from specdec_lab.notebooks import run_notebook

    out = run_notebook(name, given)
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


def _elsewhere(args: argparse.Namespace) -> Any:
    from specdec_lab.elsewhere import SYSTEMS, Setting, elsewhere
    from specdec_lab.models.zoo import placement
    from specdec_lab.sampling import Sampling

    if args.task is not None and args.profile is None:
        raise SettingError("task", args.task, "none without --profile")
    how = _drafting(args, args.task)
    arm = _arm(args, how)
    sampling = Sampling(**{name: getattr(args, name) for name in SAMPLING})
    _, dtype = placement(args.device, args.dtype)
    setting = Setting(args.main, arm, sampling, args.max_new_tokens, args.seed, dtype, how.options)
    found = {system: elsewhere(system, setting) for system in args.systems or SYSTEMS}
    for each in found.values():
        _say(
            args, "\n".join([f"# {each.checked}", *each.prepare, each.text, *(f"# lost: {line}" for line in each.lost)])
        )
        _say(args, "")
    return {system: asdict(each) for system, each in found.items()}


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
    from specdec_lab.decoding import MAX_DRAFT
    from specdec_lab.errors import ModelError
    from specdec_lab.experiment import encode_all
    from specdec_lab.models.zoo import RATIOS, load_drafter, load_main
    from specdec_lab.studies import agreement, agreement_line
    from specdec_lab.tasks import load_prompts

    for name, least in {"prompts": 1, "max_new_tokens": 2}.items():  # the last token is no place to draft for
        require(name, getattr(args, name), getattr(args, name) >= least, f"an integer >= {least}")
    require("draft_length", args.draft_length, 1 <= args.draft_length <= MAX_DRAFT, f"1 … {MAX_DRAFT}")
    main_model, drafters, found = load_main(), {}, []
    for name in args.drafts or (*RATIOS, "feature", "parallel", "ngram"):
        try:
            drafters[name] = load_drafter(name, main_model)
        except ModelError as error:
            if args.drafts:
                raise
            _say(args, f"{name} is left out: {error}")
    for task in ("json", "code", "prose"):
        ids = encode_all(_plain(main_model), load_prompts(task, args.prompts))
        for name, drafter in drafters.items():
            got = agreement(main_model, drafter, ids, args.max_new_tokens, args.draft_length)
            line = {"draft": name, "task": task, **agreement_line(main_model.model, drafter, got)}
            said = ", ".join(f"{label} {_bounded(line, key)}" for key, label in AGREEMENT.items())
            _say(args, f"{name:9} {line['ratio']:>7} ({line['ratio_without_embedding']:>6}) {task:6} {said}")
            found.append(line)
    return {"match": found}


def _bounded(line: dict[str, Any], name: str) -> str:
    """A value with its interval, – for what is undefined."""
    value, low, high = (
        "–" if line[key] is None else f"{line[key]:.3f}" for key in (name, f"{name}_low", f"{name}_high")
    )
    return f"{value} ({low} … {high})"


def _plain(main_model: Any) -> Any:
    from specdec_lab.decoding import Decoder

    return Decoder(main_model.model, tokenizer=main_model.tokenizer, eos=main_model.eos)


def _study(args: argparse.Namespace) -> Any:
    from tqdm import tqdm

    from specdec_lab import plots, studies
    from specdec_lab.errors import require_writable
    from specdec_lab.models.zoo import load_main

    names = ("drafts", "tasks", "prompts", "max_new_tokens", "lengths", "width")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    study = replace(studies.STUDIES[args.what], **given | lists)
    usual = study == studies.STUDIES[args.what]  # what README shows
    results, figures = ("data/results", "figures") if usual else ("build/results", "build/figures")
    results, figures = args.results or results, args.figures or figures
    for folder, ending in ((results, "parquet"), (results, "json"), (figures, "svg"), (figures, "png")):
        require_writable(Path(folder) / f"{studies.FILES[args.what]}.{ending}")  # told before anything is decoded
    with tqdm(unit="text", mininterval=5, file=sys.stderr) as bar:
        rows = study.run(load_main(), bar.update)
    paths = studies.store(study, rows, Path(results))
    lengths = args.what == studies.LENGTHS
    label = (
        "prompt length (tokens)" if lengths else f"position in the output (tokens; each point stands for {study.width})"
    )
    fig = plots.by_place(studies.table(rows), label, doubling=lengths)
    paths += plots.save(fig, studies.FILES[args.what], figures)
    _say(
        args, studies.table(rows).drop(columns="draft_parameters").to_string(index=False, float_format="{:.3f}".format)
    )
    _say(args, f"written: {', '.join(map(str, paths))}")
    return {"study": args.what, "table": json.loads(studies.table(rows).to_json(orient="records"))}


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
    from specdec_lab.bench import Plan, bench
    from specdec_lab.models.zoo import fetch_bundled, load_main, read
    from specdec_lab.scoreboard import publish, require_place

    names = ("tasks", "arms", "prompts", "max_new_tokens", "temperature", "top_p", "seed")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    plan = Plan(**given | {name: tuple(given[name]) for name in ("tasks", "arms") if name in given})
    if args.readme:
        require_place()  # told before anything is decoded
    main_model, (reference, _) = load_main(), read(fetch_bundled())
    reference = reference.to(device=main_model.model.device, dtype=main_model.model.dtype)
    result = bench(main_model, reference, plan, lambda line: _say(args, line))
    print(json.dumps(result, ensure_ascii=False), flush=True)  # before what may fail
    if args.readme:
        publish(result)
    return None


def _say(args: argparse.Namespace, line: str) -> None:
    """A line for people: on standard output, or on standard error where that belongs to JSON."""
    print(line, file=sys.stderr if args.json else sys.stdout, flush=True)


def _speedup_interval(traces: Sequence[tuple[Any, Any]]) -> dict[str, float | None]:
    """The 95 % interval of `speculative_speedup` over prompts, of (drafting, plain) traces; None for too few."""
    import math

    from specdec_lab.metrics import totals
    from specdec_lab.statistics import ratio_interval

    names = ("speculative_speedup_low", "speculative_speedup_high")
    if not traces:
        return dict.fromkeys(names)
    ours, plain = ([totals([pair[side]]) for pair in traces] for side in (0, 1))
    found = ratio_interval(
        [t.emitted for t in ours], [t.decode_s for t in ours], [t.emitted for t in plain], [t.decode_s for t in plain]
    )
    return {n: bound if math.isfinite(bound) else None for n, bound in zip(names, (found.low, found.high), strict=True)}


def _judged(model: Any, rows: Sequence[Any], ids: Sequence[Any], made: Sequence[Any]) -> Any:
    """A table for statistics.quality_change: the row of each prompt, its (plain, drafting) texts side by side."""
    import pandas as pd

    from specdec_lab.experiment import Scorer, prompt_sha
    from specdec_lab.statistics import PROMPT, TEXT
    from specdec_lab.tasks import get_task

    scorer, lines = Scorer(model), []
    for row, prompt, (plain, drafted) in zip(rows, ids, made, strict=False):
        ours = _or_none(scorer.judge, row, prompt, drafted)
        theirs = scorer.judge(row, prompt, plain) if ours else {}  # what cannot be scored is told once
        about = dict(zip(PROMPT, (row.task, row.id, prompt_sha(row)), strict=True))
        about |= {"quality_better": get_task(row.task).better}
        lines.append({**about, **(ours or {}), **{f"baseline_{name}": theirs.get(name) for name in TEXT}})
    columns = [*PROMPT, "quality_better", *TEXT, *(f"baseline_{name}" for name in TEXT)]
    return pd.DataFrame(lines, columns=columns)


def _changes(table: Any) -> dict[str, float | int | None]:
    """statistics.quality_change of the prompts as JSON: each value, its 95 % interval, and how many were compared."""
    import math

    from specdec_lab.statistics import quality_change

    out: dict[str, float | int | None] = {}
    for name, got in quality_change(table).items():
        bounds = {name: got.value, f"{name}_low": got.low, f"{name}_high": got.high}
        out |= {key: value if math.isfinite(value) else None for key, value in bounds.items()}
        if name == "quality_delta":
            out["quality_prompts"] = got.prompts
    return out


def _line(metrics: dict[str, Any], lossy: bool = False) -> str:
    shown = {
        "speculative_speedup": "speed-up {:.2f}×",
        "speculative_speedup_low": "({:.2f} …",
        "speculative_speedup_high": "{:.2f})",
        "throughput": "{:.1f} tokens/s",
        "acceptance_probability": "α {:.3f}",
        "draft_acceptance_rate": "accepted/drafted {:.3f}",
        "tokens_per_main_forward": "τ {:.2f}",
        "draft_cost_ratio": "c {:.3f}",
        "coverage": "coverage {:.2f}",
        "valid_share": "valid {:.2f}",
        "repetition": "repeated 4-grams {:.2f}",
    }
    if lossy:
        shown |= {"fallback_ratio": "fallback_ratio {:.2f}", "quality_prompts": "quality compared on {} prompts"}
        for name in ("quality_delta", "nll_delta", "repetition_delta"):
            shown |= {name: f"{name} {{:+.3f}}", f"{name}_low": "({:+.3f} …", f"{name}_high": "{:+.3f})"}
    return ", ".join(text.format(metrics[name]) for name, text in shown.items() if metrics.get(name) is not None)
