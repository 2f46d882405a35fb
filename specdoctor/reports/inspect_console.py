"""A draft checkpoint for a person, on one screen, drawn from the JSON document of `inspect`."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.findings import print_findings
from specdoctor.reports.output import result_table

Json = Mapping[str, Any]

_IN_THE_HEAD = ("family", "algorithm")  # fields that the first lines already show
_WORDS = {True: "yes", False: "no", None: "-"}


def print_inspection(document: Json, console: Console, *, verbose: bool = False) -> None:
    """What it is, its settings with their origins, its parts, notes and findings."""
    for label, text in _head(document):
        console.print(Text.assemble((f"{label:<10}", "bold"), text), soft_wrap=True)
    if document["spec"]:
        console.print()
        _settings(document["spec"], console, verbose)
    if document["parts"]:
        console.print()
        _parts(document, console)
    for note in _notes(document, verbose):
        console.print(Text.assemble(("note      ", "bold"), note), soft_wrap=True)
    print_findings(document["findings"], console)
    console.print(Text(_closing(document), "dim"), soft_wrap=True)


def _head(document: Json) -> list[tuple[str, str]]:
    lines = [("path", str(document["path"]))]
    if document["family"]:
        lines.append(("family", f"{document['family']}: {document['title']} (by {document['recognised_by']})"))
    else:
        lines.append(("family", "not decided, see the findings"))
    if document["algorithm"]:
        k = document["legal_k"]
        rounds = f"{document['drafts_per_round']} drafts a round, K from {k['least']} to {k['most']}"
        lines.append(("algorithm", f"{document['algorithm']}, {rounds}"))
    lines.append(("runs here", "yes" if document["runs_here"] else f"no: {document['why_not']}"))
    if document["spec"]:
        sources = (
            f"{key} from the {document[key]} ({document['spec'][field]['origin']})"
            for key, field in (("embedding", "embed_source"), ("head", "head_source"))
        )
        lines.append(("supplied", ", ".join(sources)))
    if document["exports"]:
        able = [name for name, reason in document["exports"].items() if reason is None]
        unable = [f"{name} ({reason})" for name, reason in document["exports"].items() if reason is not None]
        lines.append(("export to", (", ".join(able) or "nothing") + (f"; not {'; '.join(unable)}" if unable else "")))
    if document["calibration"]:
        lines.append(("calibr.", _calibration(document["calibration"])))
    if document["target"]:
        target = document["target"]
        sizes = f"hidden {target['hidden_size']}, {target['num_layers']} layers, vocabulary {target['vocab_size']}"
        lines.append(("target", f"{target['name']} ({sizes})"))
    return lines


def _calibration(calibration: Json) -> str:
    if not calibration["applied"]:
        return f"{calibration['file']}, not applied, see the findings"
    values = calibration["temperatures"]
    text = f"{calibration['file']}, confidence divided by temperatures {min(values):.3g} to {max(values):.3g}"
    mean = calibration["mean_ece_held_out"]
    try:
        return f"{text}; held-out ECE {mean['before']['value']:.1%} -> {mean['after']['value']:.1%}"
    except (TypeError, KeyError, ValueError):  # keys for people: another writer need not have them
        return text


def _settings(spec: Json, console: Console, verbose: bool) -> None:
    """Fields with an origin in the file, one a line; those that the format itself fixes on one line unless verbose."""
    table = result_table(console, "Settings", "field", "value", "from", left=3)
    fixed = []
    for name, entry in spec.items():
        if name in _IN_THE_HEAD or name in ("embed_source", "head_source"):
            continue
        if entry["origin"] == "fixed by the format" and not verbose:
            if entry["value"] not in (None, {}, [], False, 0):
                fixed.append(f"{name} {_value(name, entry['value'])}")
            continue
        table.add_row(name, _value(name, entry["value"]), entry["origin"])
    console.print(table)
    if fixed:
        console.print(Text(f"fixed by the format: {', '.join(fixed)}", "dim"), soft_wrap=True)


def _value(name: str, value: Any) -> str:
    if name == "layers":
        return _layers(value)
    if isinstance(value, bool) or value is None:
        return _WORDS[value]
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value('', inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return " ".join(_value("", inner) for inner in value) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _layers(layers: list[Json]) -> str:
    """Equal layers in a row as one: `5 of 32 heads, 8 kv, head dim 128, inner 9728, qk_norm`."""
    words: list[str] = []
    counts: list[int] = []
    for layer in layers:
        text = f"{layer['heads']} heads, {layer['kv_heads']} kv, head dim {layer['head_dim']}, "
        text += f"inner {layer['intermediate_size']}"
        text += "".join(f", {flag}" for flag in ("bias", "qk_norm", "causal_in_block") if layer[flag])
        text += f", window {layer['window']}" if layer["window"] else ""
        if words and words[-1] == text:
            counts[-1] += 1
        else:
            words.append(text)
            counts.append(1)
    return "; ".join(f"{count} of {text}" for count, text in zip(counts, words, strict=True)) or "-"


def _parts(document: Json, console: Console) -> None:
    table = result_table(console, "Parts", "part", "dtype", "tensors", "parameters", "bytes", left=2)
    for part in document["parts"]:
        table.add_row(
            part["name"],
            " ".join(part["dtypes"]),
            str(part["tensors"]),
            f"{part['parameters']:,}",
            _bytes(part["bytes"]),
        )
    tensors = sum(part["tensors"] for part in document["parts"])
    table.add_row("all", "", str(tensors), f"{document['parameters']:,}", _bytes(document["bytes"]))
    console.print(table)


def _bytes(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _notes(document: Json, verbose: bool) -> list[str]:
    notes = []
    for kind, ignored in (("key", document["ignored_keys"]), ("tensor", document["ignored_tensors"])):
        if verbose:
            notes += [f"{kind} {name} not used: {reason}" for name, reason in ignored.items()]
        elif ignored:
            reasons = Counter(ignored.values()).most_common(4)
            shown = ", ".join(f"{count} {reason}" for reason, count in reasons)
            more = len(ignored) - sum(count for _, count in reasons)
            rest = f", {more} others" if more else ""
            notes.append(f"{len(ignored)} {kind}{'s' * (len(ignored) > 1)} known and not used: {shown}{rest}")
    notes += [f"{remark['evidence']}" for remark in document["remarks"] if remark["kind"] == "ignored"]
    return notes


def _closing(document: Json) -> str:
    count, seconds = len(document["findings"]), document["seconds"]
    done = f"{len(document['checks'])} checks in {seconds:.1f} s: "
    if not count:
        return f"\n{done}nothing found."
    return f"\n{done}{count} finding{'s' * (count > 1)}. `specdoctor rule CODE` explains one."
