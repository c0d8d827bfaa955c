"""What is shown of a gauge: one section per network or checkpoint."""

from depthgauge.base.format import counted
from depthgauge.results.checkpoint_document import checkpoint_section
from depthgauge.results.document import Document, Section, command_line, settings_table
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.gauge_record import GaugeRecord, Subject
from depthgauge.results.network_document import network_section
from depthgauge.results.network_subject import NetworkSubject

SAVED = "network.safetensors"
"""The file name that a page suggests for a network that was gauged in memory."""


def gauge_document(result: GaugeRecord) -> Document:
    """Return what is shown of a result of `gauge`."""
    settings = result.settings
    kinds = {"network" if isinstance(subject, NetworkSubject) else "model" for subject in result.subjects}
    count = counted(len(result.subjects), kinds.pop() if len(kinds) == 1 else "subject")
    proved = ", and what is proved for every input" if any(map(_is_proved, result.subjects)) else ""
    saving = (
        "The network was gauged from Python and has no file. Save it first with "
        f'`depthgauge.save_network(network, "{SAVED}")`.'
    )
    return Document(
        version=result.version,
        heading="How deep is it, really?",
        lead=f"{count} gauged with depthgauge {result.version}: what was measured on inputs{proved}.",
        sections=tuple(gauge_section(subject, settings) for subject in result.subjects),
        command=gauge_command(settings),
        settings=settings_table(
            {"target": "the built-in pair" if settings.target is None else settings.target, **settings.given()}
        ),
        preparation=saving if settings.in_memory else "",
    )


def _is_proved(subject: Subject) -> bool:
    return isinstance(subject, NetworkSubject) and bool(subject.collapse)


def gauge_section(subject: Subject, settings: GaugeSettings) -> Section:
    """Return the section of one subject, by its kind."""
    if isinstance(subject, NetworkSubject):
        return network_section(subject, settings)
    return checkpoint_section(subject)


def gauge_command(settings: GaugeSettings) -> str:
    """Return the command that reproduces a result of `gauge`.

    A network that was gauged in memory has no file; the command names the file it must be saved to first.

    >>> gauge_command(GaugeSettings(target="some name", tokens=8, in_memory=True))
    'depthgauge gauge --tokens 8 network.safetensors'
    """
    return command_line("gauge", settings.given(), SAVED if settings.in_memory else settings.target)
