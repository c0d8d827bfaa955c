"""The page of a result: its sections, and the command that reproduces it."""

from depthgauge._format import counted
from depthgauge.report.checkpoint_section import checkpoint_facts, checkpoint_parts
from depthgauge.report.markup import command_line, settings_table
from depthgauge.report.monitor_section import monitor_page
from depthgauge.report.network_section import network_facts, network_parts
from depthgauge.report.page_parts import Page, Section
from depthgauge.report.shrink_section import shrink_page
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.gauge_record import GaugeRecord, Subject
from depthgauge.results.monitor_record import MonitorRecord
from depthgauge.results.network_subject import NetworkSubject
from depthgauge.results.shrink_record import ShrinkRecord

SAVED = "network.safetensors"
"""The file name that a page suggests for a network that was gauged in memory."""


def page_of(result: GaugeRecord | ShrinkRecord | MonitorRecord) -> Page:
    """Return what the page of a result shows."""
    if isinstance(result, MonitorRecord):
        return monitor_page(result)
    return shrink_page(result) if isinstance(result, ShrinkRecord) else gauge_page(result)


def gauge_page(result: GaugeRecord) -> Page:
    """Return the page of a result of `gauge`: one section per network or checkpoint."""
    settings = result.settings
    kinds = {"network" if isinstance(subject, NetworkSubject) else "model" for subject in result.subjects}
    count = counted(len(result.subjects), kinds.pop() if len(kinds) == 1 else "subject")
    proved = ", and what is proved for every input" if any(subject.collapse for subject in result.subjects) else ""
    saving = (
        "The network was gauged from Python and has no file. Save it first with "
        f'`depthgauge.save_network(network, "{SAVED}")`.'
    )
    return Page(
        version=result.version,
        heading="How deep is it, really?",
        lead=f"{count} gauged with depthgauge {result.version}: what was measured on inputs{proved}.",
        sections=tuple(section(subject, settings) for subject in result.subjects),
        command=gauge_command(settings),
        settings=settings_table(
            {"target": "the built-in pair" if settings.target is None else settings.target, **settings.given()}
        ),
        preparation=saving if settings.in_memory else "",
    )


def gauge_command(settings: GaugeSettings) -> str:
    """Return the command that reproduces a result of `gauge`.

    A network that was gauged in memory has no file; the command names the file it must be saved to first.

    >>> gauge_command(GaugeSettings(target="some name", tokens=8, in_memory=True))
    'depthgauge gauge --tokens 8 network.safetensors'
    """
    return command_line("gauge", settings.given(), SAVED if settings.in_memory else settings.target)


def section(subject: Subject, settings: GaugeSettings) -> Section:
    """Return the section of one subject, by its kind."""
    if isinstance(subject, NetworkSubject):
        return Section(subject.name, subject.verdict, network_facts(subject, settings), network_parts(subject))
    return Section(subject.name, subject.verdict, checkpoint_facts(subject), checkpoint_parts(subject))
