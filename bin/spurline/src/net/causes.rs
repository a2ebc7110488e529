//! Findings of the doctor that may explain a poor measurement, on both ends. The fabric crate makes findings, and the
//! probe crate judges measurements.

use spurline_fabric::finding::id;
use spurline_fabric::{DoctorOptions, HostFacts, HostFinding, HostTree, Severity, archive, examine};
use spurline_probe::client::ProbeSession;
use spurline_probe::judge::{ProbeVerdict, RelatedFinding, VerdictLevel};
use spurline_probe::measure::ProbeOutcome;
use std::time::Duration;

/// Longest wait for the other end's facts.
const PEER_FACTS_TIMEOUT: Duration = Duration::from_secs(10);
const SENTENCE_FINDINGS_MAX: usize = 4;

/// Findings that slow down a port or an interface.
const OF_A_PORT: &[&str] = &[
    id::LINK_RATE,
    id::LINK_WIDTH,
    id::PCIE_BANDWIDTH,
    id::PCIE_SPEED,
    id::PCIE_WIDTH,
    id::IPOIB_MODE,
    id::MTU_LOW,
    id::SAME_SUBNET,
    id::ARP_FLUX,
    id::RP_FILTER,
    id::BOND_MODE,
    id::PORT_ERRORS,
    id::RETRANSMISSIONS,
    id::CONGESTION,
    id::ROCE_FLOW_CONTROL,
    id::RELAXED_ORDERING,
    id::NUMA_DISTANCE,
];
/// Findings that slow down a host.
const OF_A_HOST: &[&str] = &[id::CPU_GOVERNOR, id::IOMMU];

/// Adds to a poor verdict the findings about the measured interfaces, and names these in the sentence.
pub fn add_findings(judgement: &mut ProbeVerdict, session: &mut ProbeSession, outcome: &ProbeOutcome) {
    if judgement.level != VerdictLevel::Poor || outcome.same_host {
        return;
    }
    let links = |here: bool| -> Vec<String> {
        let rails = outcome.rails.iter().filter_map(|r| if here { Some(&r.link) } else { r.peer.as_ref() });
        let first = if here { Some(&outcome.link) } else { outcome.report.as_ref().map(|r| &r.link) };
        rails.chain(first).map(|link| link.interface.clone()).collect()
    };
    judgement.causes.extend(of_end(&HostTree::live(), &links(true), true));
    // A server without facts contributes no findings.
    let facts = session.welcome.facts.then(|| session.fetch_facts(PEER_FACTS_TIMEOUT).ok()).flatten();
    if let Some(entries) = facts.and_then(|bytes| archive::read_archive(bytes.as_slice()).ok()) {
        judgement.causes.extend(of_end(&HostTree::from_memory(entries), &links(false), false));
    }
    let own = judgement.finding;
    let mut words: Vec<String> = judgement
        .causes
        .iter()
        .filter(|c| Some(c.id) != own)
        .map(|c| format!("{} ({}{})", c.id, c.subject, if c.here { "" } else { " there" }))
        .collect();
    words.dedup();
    words.truncate(SENTENCE_FINDINGS_MAX);
    if !words.is_empty() {
        judgement.sentence.push_str(&format!("; see also {}", words.join(", ")));
    }
    if judgement.finding.is_none() {
        judgement.finding = judgement.causes.first().map(|c| c.id);
    }
}

/// Findings about these interfaces, the devices behind or the whole host.
fn of_end(tree: &HostTree, interfaces: &[String], here: bool) -> Vec<RelatedFinding> {
    let host = HostFacts::read_from(tree);
    let mut names: Vec<&str> = Vec::new();
    for interface in interfaces.iter().filter_map(|name| host.interface(name)) {
        names.push(&interface.name);
        names.extend(host.physical_interfaces(interface).iter().map(|i| i.name.as_str()));
        names.extend(host.ports_of(interface).iter().map(|(device, _)| device.name.as_str()));
    }
    let found = examine(tree, &DoctorOptions::default());
    found
        .iter()
        .filter(|f| bears_on(f, &names))
        .map(|f| RelatedFinding { id: f.id, subject: f.subject.clone(), here })
        .collect()
}

/// Whether a finding may slow down traffic over the interfaces and devices of these names.
fn bears_on(finding: &HostFinding, names: &[&str]) -> bool {
    let weighs = finding.severity != Severity::Info || finding.id == id::IPOIB_MODE;
    let mut words = finding.subject.split(|c: char| !(c.is_alphanumeric() || "_-.@".contains(c)));
    let is_about = OF_A_PORT.contains(&finding.id) && words.any(|word| names.contains(&word));
    weighs && (is_about || OF_A_HOST.contains(&finding.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_of_other_interfaces_are_left_out() {
        let finding = |id, severity, subject: &str| HostFinding::new(id, severity, subject, "", "");
        let names = ["ib0", "mlx5_0"];
        assert!(bears_on(&finding(id::PCIE_WIDTH, Severity::Warning, "mlx5_0"), &names));
        assert!(bears_on(&finding(id::LINK_RATE, Severity::Warning, "mlx5_0/1"), &names));
        assert!(bears_on(&finding(id::IPOIB_MODE, Severity::Info, "ib0"), &names));
        assert!(bears_on(&finding(id::SAME_SUBNET, Severity::Warning, "ib0, ib1"), &names));
        assert!(bears_on(&finding(id::CPU_GOVERNOR, Severity::Warning, "processors"), &names));
        assert!(!bears_on(&finding(id::MTU_LOW, Severity::Warning, "ib01"), &names));
        assert!(!bears_on(&finding(id::MTU_LOW, Severity::Info, "ib0"), &names));
        assert!(!bears_on(&finding(id::NOT_PERSISTED, Severity::Warning, "ib0"), &names));
    }
}
