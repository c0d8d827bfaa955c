"""The section of the page for one subject, by its kind."""

from depthgauge.report.checkpoint_section import checkpoint_facts, checkpoint_parts
from depthgauge.report.network_section import network_facts, network_parts
from depthgauge.report.page_parts import Section
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.gauge_record import Subject
from depthgauge.results.network_subject import NetworkSubject


def section(subject: Subject, settings: GaugeSettings) -> Section:
    """Return the section of one subject."""
    if isinstance(subject, NetworkSubject):
        return Section(subject.name, subject.verdict, network_facts(subject, settings), network_parts(subject))
    return Section(subject.name, subject.verdict, checkpoint_facts(subject), checkpoint_parts(subject))
