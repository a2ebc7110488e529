//! `spurline k8s verify`: from inside a pod, checks devices, ports, GIDs and locked memory, then measures each rail with
//! the project's probes; or prints the two pods that do so between nodes. The checks are in the crates below.

mod pods;
mod rails;

use super::lint::read_text;
use crate::net::collect::NODE_NAME_FILE;
use crate::net::peer::TokenArgs;
use crate::net::table::{BAD, GOOD, HEAD, append_table, styled_cell};
use anstyle::Style;
use clap::Args;
use rails::{RailFigures, RailMeasurement};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_fabric::{HostFacts, HostTree};
use spurline_kube_devices::NodeHcas;
use spurline_kube_devices::perftest::{PerftestReport, PerftestRow, read_perftest};
use spurline_kube_devices::verify::{PodLimits, VerifyEnd, VerifyRow, shared_hardware, verify_pod};
use spurline_probe::client::ProbeSession;
use spurline_probe::drive::RunLimits;
use spurline_rails::MemlockLimit;
use spurline_types::{Size, parse_duration};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Exit code 0 when every row passes, else 1.

Examples:
  In one pod: devices, GIDs, locked memory, ports, and the HCA's own loopback:
    spurline k8s verify --here
  Between two pods; in the first one, then in the second one:
    spurline net serve --bind all
    spurline k8s verify --peer ADDRESS-OF-THE-FIRST
  Print these two pods and the commands that run them:
    spurline k8s verify --resource rdma/ib --node node1 --node node2 \\
        --image registry.example.com/spurline
  Judge what ib_write_bw or ib_write_lat printed, against a port of 400 Gb/s:
    spurline k8s verify --read bw.txt --rate 400";

/// A bandwidth above this share of the port's rate, in per cent, can't be that of a single port in one direction.
const MAX_SHARE_PERCENT: f64 = 105.0;
/// Messages of at least this size reach a port's rate.
const LARGE_MESSAGE_BYTES: u64 = 4096;

/// The arguments of `k8s verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Check this pod alone, and measure each rail against itself
    #[arg(long, group = "what")]
    pub here: bool,
    /// Check this pod, and measure each rail to another pod or host that runs `spurline net serve`
    #[arg(long, value_name = "HOST", group = "what")]
    pub peer: Option<String>,
    /// Read the output of ib_write_bw, ib_write_lat or another program of perftest; - is standard input
    #[arg(long, value_name = "FILE", group = "what")]
    pub read: Option<PathBuf>,
    /// Least bandwidth of a rail, in per cent of its port's rate
    #[arg(long, value_name = "PERCENT", default_value_t = 70, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub min_share: u32,
    /// Highest median latency of a rail [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub max_latency: Option<Duration>,
    /// Memory that the pod has to be able to lock
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub memlock: Size,
    /// Length of each measurement; 0 measures nothing
    #[arg(short, long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    pub time: Duration,
    /// Longest wait for an answer of the peer, and longest stall of a measurement
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Rate of the port in Gb/s: for --read, and where the driver reports none or another one
    #[arg(long, value_name = "GBPS")]
    pub rate: Option<f64>,
    /// The pods to print.
    #[command(flatten)]
    pub pods: pods::PodArgs,
    #[command(flatten)]
    pub token: TokenArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// All results.
#[derive(Default)]
struct VerifyReport {
    rows: Vec<VerifyRow>,
    figures: Vec<RailFigures>,
    notes: Vec<String>,
    here: Option<VerifyEnd>,
    there: Option<VerifyEnd>,
    perftest: Option<PerftestReport>,
}

/// Runs the command.
///
/// # Errors
/// When the other end can't be reached, or a file can't be read.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, Fault> {
    let mut report = VerifyReport::default();
    if args.timeout < Duration::from_secs(2) {
        let what = format!("--timeout {}s is too short", args.timeout.as_secs_f64());
        return Err(Fault::usage(what, "both ends speak up every second: give it 2s or more"));
    }
    if let Some(path) = &args.read {
        judge_perftest(args, read_perftest(&read_text(path, "--read")?), &mut report);
    } else if args.here || args.peer.is_some() {
        verify_here(args, &mut report)?;
    } else {
        return pods::print_pods(&args.pods);
    }
    let passed = report.rows.iter().all(|row| row.pass);
    if args.json {
        anstream::println!("{:#}", report_json(&report, passed));
    } else {
        anstream::print!("{}", report_text(&report, passed));
    }
    Ok(ExitCode::from(u8::from(!passed)))
}

fn verify_here(args: &VerifyArgs, report: &mut VerifyReport) -> Result<(), Fault> {
    let tree = HostTree::live();
    let facts = HostFacts::read_from(&tree);
    let node = NodeHcas::read_from(&tree);
    let memlock = MemlockLimit::of_process();
    let limits = PodLimits {
        memlock: memlock.limit.filter(|_| !memlock.lifted),
        needed: args.memlock.bytes(),
        open_node: &open_node,
    };
    report.rows = verify_pod(&facts, &node, &limits);
    let here = VerifyEnd::read_from(&tree, std::env::var("NODE_NAME").ok());
    let mut session = match &args.peer {
        Some(peer) => {
            let mut session = rails::connect_peer(peer, &args.token, args.timeout)?;
            let tree = rails::fetch_tree(&mut session, args.timeout)?;
            let there = VerifyEnd::read_from(&tree, tree.read_text(NODE_NAME_FILE));
            report.notes.extend(shared_hardware(&here, &there));
            report.there = Some(there);
            Some(session)
        }
        None => None,
    };
    report.here = Some(here);
    let has_device = report.rows.iter().any(|row| row.check == "device" && row.pass);
    let has_memory = report.rows.iter().all(|row| row.check != "memlock" || row.pass);
    if args.time.is_zero() {
        report.notes.push("nothing was measured: --time 0s".to_owned());
    } else if !has_device || !has_memory {
        report.notes.push("nothing was measured: see the rows that failed".to_owned());
    } else {
        measure_rails(args, &facts, session.as_mut(), report)?;
    }
    Ok(())
}

fn open_node(path: &str) -> std::result::Result<(), String> {
    std::fs::File::options().read(true).write(true).open(path).map(drop).map_err(|error| error.to_string())
}

fn measure_rails(
    args: &VerifyArgs,
    facts: &HostFacts,
    session: Option<&mut ProbeSession>,
    report: &mut VerifyReport,
) -> Result<(), Fault> {
    let limits = RunLimits { time: args.time, ops: None, patience: args.timeout, pause: Duration::ZERO };
    // Traffic between two programs of a node may stay inside the HCA, faster than a port.
    let crosses_ports = match (&report.here, &report.there) {
        (Some(here), Some(there)) => shared_hardware(here, there).is_none(),
        _ => false,
    };
    let measured = match session {
        Some(session) => rails::measure_to_peer(session, &limits)?,
        None => rails::measure_loopback(&limits)?,
    };
    if measured.is_empty() {
        report.notes.push(
            "nothing was measured: the probes connect by IP address, and no interface with one belongs to an HCA here; \
             run ib_write_bw in both pods and give its output to --read"
                .to_owned(),
        );
    }
    for RailMeasurement { interface, result } in measured {
        let rate = args.rate.or_else(|| port_rate(facts, &interface));
        match result {
            Ok(mut figures) => {
                figures.rate_gbps = rate;
                let measured =
                    PortBandwidth { subject: &interface, gbps: figures.gbps, sum: None, limited: crosses_ports };
                report.rows.push(bandwidth_row(args.min_share, &measured, rate));
                report.rows.push(latency_row(args, &interface, &figures));
                report.figures.push(figures);
            }
            Err(fault) => report.rows.push(VerifyRow::failed("bandwidth", interface, fault.what, fault.remedy)),
        }
    }
    Ok(())
}

/// The rate of the port behind an interface in Gb/s; `None` for a device in software whose interface has no speed: the driver
/// makes a speed up.
fn port_rate(facts: &HostFacts, interface: &str) -> Option<f64> {
    let interface = facts.interface(interface)?;
    let ports = facts.ports_of(interface);
    let mut known = ports.iter().filter(|(device, _)| device.pci.is_some() || interface.speed_mbps.is_some());
    known.find_map(|(_, port)| port.rate.as_ref().map(|rate| rate.gbps))
}

/// A measured bandwidth of a port in one direction.
struct PortBandwidth<'a> {
    subject: &'a str,
    gbps: f64,
    /// The measured sum and the parts, if measured as a sum.
    sum: Option<String>,
    /// Whether the traffic crossed the port, whose rate is then a limit.
    limited: bool,
}

fn bandwidth_row(min_share: u32, measured: &PortBandwidth<'_>, rate: Option<f64>) -> VerifyRow {
    let PortBandwidth { subject, gbps, sum, limited } = measured;
    let parts = sum.as_ref().map_or(String::new(), |sum| format!(" ({sum})"));
    let Some(rate) = rate.filter(|rate| *rate > 0.0) else {
        return VerifyRow::passed(
            "bandwidth",
            *subject,
            format!("{gbps:.2} Gb/s{parts}; the port's rate is not known"),
        );
    };
    let share = gbps * 100.0 / rate;
    let evidence = format!("{gbps:.2} Gb/s{parts}, {share:.0} % of the port's {rate} Gb/s");
    if *limited && share > MAX_SHARE_PERCENT {
        let remedy = "more than the port carries: the rate is that of another port, or the figure is a sum of several ports \
                      or directions, or the traffic did not cross the port";
        return VerifyRow::failed("bandwidth", *subject, evidence, remedy);
    }
    if share >= f64::from(min_share) {
        return VerifyRow::passed("bandwidth", *subject, evidence);
    }
    let remedy = format!(
        "less than {min_share} %: check PCIe width, NUMA node, MTU and congestion with `spurline net doctor` on the nodes"
    );
    VerifyRow::failed("bandwidth", *subject, evidence, remedy)
}

fn latency_row(args: &VerifyArgs, subject: &str, figures: &RailFigures) -> VerifyRow {
    let (Some(median), Some(min)) = (figures.median_us, figures.min_us) else {
        return VerifyRow::failed("latency", subject, "no round trip was completed", "see the other rows");
    };
    let evidence = format!(
        "minimum {min:.2}, median {median:.2}{}{} us",
        named_figure("p99", figures.p99_us),
        named_figure("standard deviation", figures.stdev_us)
    );
    match args.max_latency {
        Some(limit) if median > limit.as_secs_f64() * 1e6 => {
            let remedy = format!("more than {} us: check the path, and processors in power saving", limit.as_micros());
            VerifyRow::failed("latency", subject, evidence, remedy)
        }
        _ => VerifyRow::passed("latency", subject, evidence),
    }
}

fn named_figure(name: &str, value: Option<f64>) -> String {
    value.map_or(String::new(), |v| format!(", {name} {v:.2}"))
}

/// Rows from what perftest printed.
fn judge_perftest(args: &VerifyArgs, found: PerftestReport, report: &mut VerifyReport) {
    let subject = found.device.clone().unwrap_or_else(|| "perftest".to_owned());
    for (end, name) in [(&found.local, "local"), (&found.remote, "remote")] {
        if end.has_zero_gid() {
            report.rows.push(VerifyRow::failed(
                "gid",
                format!("{subject} {name}"),
                "the GID is zero",
                "that pod has no interface on the HCA: `spurline k8s advise` says which attachment",
            ));
        }
    }
    for failure in &found.failures {
        let remedy = "run `spurline k8s verify --here` in both pods";
        report.rows.push(VerifyRow::failed("perftest", &subject, failure, remedy));
    }
    for column in &found.unknown_columns {
        let evidence = format!("the column {column} can't be read: its unit is not known");
        let remedy = "repeat the test with --report_gbits, and without --report-cycles";
        report.rows.push(VerifyRow::failed("perftest", &subject, evidence, remedy));
    }
    for row in found.decisive_rows() {
        let named = format!("{subject} {} B", row.bytes);
        if let (Some(gbps), Some(sum)) = (row.port_gbps(), row.gbps) {
            let parts = sum_of_parts(row, sum);
            let measured = PortBandwidth { subject: &named, gbps, sum: parts, limited: true };
            let mut judged = bandwidth_row(args.min_share, &measured, args.rate);
            if !judged.pass && row.bytes < LARGE_MESSAGE_BYTES {
                judged.remedy = format!(
                    "messages of {} B do not reach a port's rate: measure larger ones (-s 65536, or -a)",
                    row.bytes
                );
            }
            report.rows.push(judged);
        }
        if row.median_us.is_some() || row.average_us.is_some() {
            let figures = RailFigures {
                interface: subject.clone(),
                // A test of a fixed time prints an average only.
                min_us: row.min_us.or(row.average_us),
                median_us: row.median_us.or(row.average_us),
                p99_us: row.p99_us,
                stdev_us: row.stdev_us,
                ..Default::default()
            };
            report.rows.push(latency_row(args, &named, &figures));
        }
    }
    if report.rows.is_empty() {
        let evidence = "the file has no table of perftest";
        let remedy = "give the complete output of the client's side";
        report.rows.push(VerifyRow::failed("perftest", &subject, evidence, remedy));
    }
    report.perftest = Some(found);
}

/// `sum of 2 directions: 196.40 Gb/s`; `None` for a single port in one direction.
fn sum_of_parts(row: &PerftestRow, sum: f64) -> Option<String> {
    let directions = (row.directions > 1).then(|| format!("{} directions", row.directions));
    let ports = (row.ports > 1).then(|| format!("{} ports", row.ports));
    let parts: Vec<String> = directions.into_iter().chain(ports).collect();
    (!parts.is_empty()).then(|| format!("the sum of {} is {sum:.2} Gb/s", parts.join(" and ")))
}

fn report_json(report: &VerifyReport, passed: bool) -> Value {
    json!({
        "pass": passed,
        "rows": report.rows,
        "measurements": report.figures,
        "here": report.here,
        "peer": report.there,
        "perftest": report.perftest,
        "notes": report.notes,
    })
}

fn report_text(report: &VerifyReport, passed: bool) -> String {
    let mut out = String::new();
    let plain = Style::new();
    for (name, end) in [("here", &report.here), ("peer", &report.there)] {
        let Some(end) = end else { continue };
        let node = end.node.as_ref().map_or(String::new(), |node| format!(" on node {node}"));
        out.push_str(&format!("{name}: {}{node}\n", end.host));
        for rail in &end.rails {
            let gid = rail.gid.as_deref().unwrap_or("no usable GID");
            let lid = rail.lid.filter(|lid| *lid > 0).map_or(String::new(), |lid| format!(", LID {lid}"));
            let guid = rail.guid.as_deref().unwrap_or("unknown");
            out.push_str(&format!("    {}/{}, GUID {guid}{lid}, {gid}\n", rail.hca, rail.port));
        }
    }
    let mut table = vec![["CHECK", "SUBJECT", "RESULT", "EVIDENCE"].map(|h| styled_cell(h, HEAD)).into()];
    for row in &report.rows {
        let (word, style) = if row.pass { ("pass", GOOD) } else { ("fail", BAD) };
        table.push(vec![
            styled_cell(row.check, plain),
            styled_cell(&*row.subject, plain),
            styled_cell(word, style),
            styled_cell(&*row.evidence, plain),
        ]);
    }
    append_table(&mut out, &table);
    for row in report.rows.iter().filter(|row| !row.pass) {
        out.push_str(&format!("{GOOD}fix{GOOD:#} {} {}: {}\n", row.check, row.subject, row.remedy));
    }
    for note in &report.notes {
        out.push_str(&format!("note: {note}\n"));
    }
    let (word, style) = if passed { ("passed", GOOD) } else { ("failed", BAD) };
    out.push_str(&format!("{style}{word}{style:#}\n"));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct VerifyParser {
        #[command(flatten)]
        args: VerifyArgs,
    }

    /// The rows about a table of ib_write_bw.
    fn judge(title: &str, unit: &str, average: &str, rate: &str) -> Vec<VerifyRow> {
        let text = format!(
            "   {title} BW Test\n #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]\n \
             2 5000 0.1 0.1 0.7\n 65536      5000           1.0       {average}   0.7\n"
        );
        let args = VerifyParser::try_parse_from(["verify", "--read", "-", "--rate", rate]).unwrap().args;
        let mut report = VerifyReport::default();
        judge_perftest(&args, read_perftest(&text), &mut report);
        report.rows
    }

    #[test]
    fn a_table_of_perftest_passes_only_with_a_figure_that_a_port_can_have() {
        for (title, unit, average, rate, pass, says) in [
            ("RDMA_Write", "Gb/sec", "196.40", "200", true, "196.40 Gb/s, 98 % of the port's 200 Gb/s"),
            ("RDMA_Write", "Gb/sec", "100.00", "200", false, "50 % of"),
            ("RDMA_Write", "Gb/sec", "211.00", "200", false, "106 % of"),
            ("RDMA_Write", "MiB/sec", "23000.00", "200", true, "192.94 Gb/s, 96 %"),
            (
                "RDMA_Write Bidirectional",
                "Gb/sec",
                "196.40",
                "200",
                false,
                "98.20 Gb/s (the sum of 2 directions is 196.40 Gb/s), 49 %",
            ),
            ("RDMA_Write Bidirectional", "Gb/sec", "390.00", "200", true, "98 %"),
            ("RDMA_Write", "GiB/sec", "22.00", "200", false, "the column BW average[GiB/sec] can't be read"),
        ] {
            let rows = judge(title, unit, average, rate);
            assert!(rows.iter().all(|row| row.pass) == pass, "{title} {unit} {average}: {rows:?}");
            assert!(rows.iter().any(|row| row.evidence.contains(says)), "{title} {unit} {average}: {rows:?}");
        }
    }

    #[test]
    fn inside_an_hca_a_port_is_no_limit() {
        let measured = |limited| PortBandwidth { subject: "ib0", gbps: 300.0, sum: None, limited };
        assert!(bandwidth_row(70, &measured(false), Some(200.0)).pass);
        let judged = bandwidth_row(70, &measured(true), Some(200.0));
        assert!(!judged.pass && judged.remedy.contains("more than the port carries"), "{judged:?}");
    }
}
