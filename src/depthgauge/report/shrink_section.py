"""The page of a shrunk checkpoint: what was removed, what it costs on each text, what is guaranteed, what it saves."""

import sys

from depthgauge._format import DASH, counted, duration, number
from depthgauge.report.charts import PROVED, figure, hovering, names_axis, single
from depthgauge.report.markup import Table, capital, command_line, runs, settings_table
from depthgauge.report.page_parts import Page, PagePart, Section, present
from depthgauge.report.shrink_charts import curve_part, repair_part, stack_part, text_part
from depthgauge.results.shrink_record import ShrinkRecord
from depthgauge.results.shrink_verdicts import (
    guarantee_sentences,
    heal_sentence,
    limit_failed,
    reload_sentence,
    shrink_costs,
    shrink_verdict,
    tested_words,
    why_not_guaranteed,
)

SAVED = "model"
"""The directory that a page suggests for a model that was shrunk in memory."""
_OUT = "smaller"
"""The output directory that a page suggests where none was written."""


def shrink_page(record: ShrinkRecord) -> Page:
    """Return the page of a result of `shrink`."""
    saving = (
        "The model was shrunk from Python and has no file. Save it and its tokenizer first with "
        f'`model.save_pretrained("{SAVED}")` and `tokenizer.save_pretrained("{SAVED}")`.'
    )
    plan = record.plan
    return Page(
        version=record.version,
        heading="How small can it be?",
        lead=f"A checkpoint shrunk with depthgauge {record.version}: what was removed, what it costs, what it saves.",
        sections=(Section(record.name, capital(shrink_verdict(record)), shrink_facts(record), shrink_parts(record)),),
        command=shrink_command(record),
        settings=settings_table({"model": plan.model, **plan.settings.given()}),
        preparation="" if plan.files else saving,
    )


def shrink_command(record: ShrinkRecord) -> str:
    """Return the command that reproduces a result of `shrink`."""
    options = {**record.plan.settings.given(), "out": record.out or _OUT}
    return command_line("shrink", options, record.plan.model if record.plan.files else SAVED)


def shrink_facts(record: ShrinkRecord) -> tuple[tuple[str, str], ...]:
    """Return what the model is, how it was shrunk and on what text."""
    plan, settings = record.plan, record.plan.settings
    facts = [
        ("source", plan.model),
        ("family", plan.family),
        ("layers", f"{record.layers_before} → {record.layers_after}"),
        ("removed layers", runs(record.removed)),
        ("weights", "repaired" if record.repaired else "unchanged"),
    ]
    if record.parameters.before is not None and record.parameters.after is not None:
        facts.append(("parameters", f"{record.parameters.before:,} → {record.parameters.after:,}"))
    calibration = plan.calibration
    for part, meaning in (("fit", "fit the repair"), ("select", "select the plan"), ("certify", "certify")):
        counts = {source.name: getattr(source, part) for source in calibration.sources if getattr(source, part)}
        total = counted(sum(counts.values()), "window")
        facts.append((f"to {meaning}", total + f" of {calibration.window} tokens"))
    if calibration.bos is not None:
        facts.append(("BOS token", f"{'added' if calibration.bos else 'not added'}: {calibration.bos_reason}"))
    facts.append(("effort, seed", f"{settings.effort}, {settings.seed}"))
    facts.append(("duration", duration(record.seconds)))
    facts.append(("written to", record.out or "nothing was written"))
    return tuple(facts)


def shrink_parts(record: ShrinkRecord) -> tuple[PagePart, ...]:
    """Return all parts of the section, in order."""
    makers = (stack_part, guarantee_part, text_part, curve_part, cost_part, repair_part, search_part, notes_part)
    return present(*(make(record) for make in makers))


def guarantee_part(record: ShrinkRecord) -> PagePart:
    """Return the guarantee in sentences, and the sizes that were tested against a limit."""
    guarantee, title = record.guarantee, "What is guaranteed"
    sentences = guarantee_sentences(record)
    if guarantee is None or (not sentences and not limit_failed(guarantee)):
        statement = f"{capital(why_not_guaranteed(record))}."
        return PagePart("guarantee", title, "The increases below were measured.", statements=(statement,))
    statements = sentences[:-1] or (f"{capital(shrink_verdict(record))}.",)
    if not guarantee.tested:
        return PagePart("guarantee", title, guarantee.assumption, statements=statements)
    names = [str(size.removed) for size in guarantee.tested]
    bars = {
        "type": "bar", "x": names, "y": [size.bound for size in guarantee.tested], "showlegend": False,
        "marker": {"color": [PROVED if size.passed else "@rule-strong" for size in guarantee.tested]},
        **hovering([
            f"{counted(size.removed, 'layer')} removed<br>bound <b>{number(size.bound)}</b><br>"
            f"within the limit: {tested_words(size)}"
            for size in guarantee.tested
        ]),
    }  # fmt: skip
    legend = {
        "type": "scatter", "mode": "lines", "x": [None], "y": [None], "hoverinfo": "skip", "name": "limit",
        "line": {"color": "@ink", "width": 1.5, "dash": "dash"}, "showlegend": True,
    }  # fmt: skip
    line = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": guarantee.limit, "y1": guarantee.limit,
        "line": {"color": "@ink", "width": 1.5, "dash": "dash"},
    }  # fmt: skip
    bounds = [size.bound for size in guarantee.tested if size.bound is not None]
    known = [0.0, guarantee.limit or 0.0, *bounds]
    low, high = min(known), max(known)
    margin = min(0.1 * (high / 2 - low / 2), sys.float_info.max - max(high, -low))
    drawn = figure(
        bars,
        legend,
        x=names_axis("layers removed", names),
        y={"title": "bound", "range": [low - margin if low else 0.0, high + margin or 1.0]},
        top=32,
        bargap=0.4,
        shapes=[] if guarantee.limit is None else [line],
    )
    passed = [size.removed for size in guarantee.tested if size.passed]
    found = f"{counted(max(passed), 'layer')} removed is the largest size that passed" if passed else "no size passed"
    alt = f"Bar chart of the bound by number of removed layers. The limit is {number(guarantee.limit)}; {found}."
    table = Table(
        "Sizes tested against the limit",
        ("layers removed", "bound", "within the limit"),
        tuple((size.removed, size.bound, tested_words(size)) for size in guarantee.tested),
    )
    chart = single(alt, 300, drawn)
    return PagePart("guarantee", title, guarantee.assumption, chart, table, table_open=True, statements=statements)


def cost_part(record: ShrinkRecord) -> PagePart | None:
    """Return parameters, bytes, memory and times before and after."""
    costs = shrink_costs(record)
    if not costs:
        return None
    rows = tuple((cost.name, cost.text(cost.before), cost.text(cost.after), cost.ratio) for cost in costs)
    table = Table("Size and speed", ("cost", "before", "after", "after ÷ before"), rows)
    what = "" if record.speed is None or not record.speed.what else f" Times: {record.speed.what}."
    caption = f"Both models were measured in turns in one run; a ratio below 1 is smaller or faster.{what}"
    return PagePart("costs", "Size, memory and speed", caption, None, table, table_open=True, half=True)


def search_part(record: ShrinkRecord) -> PagePart | None:
    """Return the removals of the search in their order."""
    plan = record.plan
    if not plan.search:
        return None
    rows = tuple((k + 1, step.layer, step.unrepaired, step.step, step.objective) for k, step in enumerate(plan.search))
    columns = ("removal", "layer", "not repaired", "repair step", "repaired")
    swaps = [f"layer {back} was put back and layer {instead} removed instead" for back, instead in plan.swaps]
    caption = (
        "The objective on the selection windows after each removal, before and after the repair of the layer before it."
    )
    if len(plan.removed) < len(plan.search):
        caption += f" The model without the first {len(plan.removed)} of them was written."
    if swaps:
        caption += f" Then {'; '.join(swaps)}."
    return PagePart("search", "The search", caption, None, Table("Removals in order", columns, rows), table_open=True)


def notes_part(record: ShrinkRecord) -> PagePart | None:
    """Return the check of the written model, healing, remarks and versions."""
    lines = [reload_sentence(record.reload)] if record.reload is not None else []
    lines += [heal_sentence(record.heal)] if record.heal is not None else []
    caption = " ".join(f"{capital(line)}." for line in (*lines, *record.notes))
    if not caption and not record.versions:
        return None
    table = Table("Versions", ("package", "version"), tuple(record.versions.items()))
    return PagePart("notes", "Checks and notes", caption or DASH, None, table if record.versions else None)
