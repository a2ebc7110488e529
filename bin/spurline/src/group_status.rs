//! `spurline status --registry`: a table of the nodes of a group.

use crate::degraded::{node_reasons, state_with};
use crate::report::printable;
use crate::stage;
use anstyle::{AnsiColor, Style};
use serde::Serialize;
use serde_json::{Value, json};
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_observe::documents::{CacheDiskStatus, RailStatus, STATE_UP};
use spurline_runtime::group_nodes::{NodeFigures, NodeReport, query_group};
use spurline_runtime::rules::human_time as time;
use spurline_types::Stats;
use spurline_types::units::human_bytes;
use std::collections::BTreeMap;
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const GREEN: Style = AnsiColor::Green.on_default();
const BOLD: Style = Style::new().bold();

/// Prints all nodes; exit code 1 when a node does not answer or does not work well.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or knows no node.
pub fn run(registry: &Registry, name: &str, trust: &TrustConfig, as_json: bool) -> Result<ExitCode, Fault> {
    let lines = query_group(registry, name, trust)?;
    let all_well = lines.iter().all(|line| node_state(line) == STATE_UP);
    for line in &lines {
        if as_json {
            anstream::println!("{}", as_object(line));
        }
    }
    if !as_json {
        print_table(name, &lines);
    }
    Ok(ExitCode::from(u8::from(!all_well)))
}

/// Why a node that answers does not work well.
fn reasons_of(line: &NodeReport) -> Vec<String> {
    line.answer.as_ref().map_or_else(
        |_| Vec::new(),
        |answer| {
            let mut reasons = node_reasons(&answer.status);
            reasons.extend(stage::late_uploads(&answer.stats));
            reasons
        },
    )
}

fn node_state(line: &NodeReport) -> String {
    match &line.answer {
        Ok(_) => state_with(STATE_UP, &reasons_of(line)),
        Err(_) => "down".to_owned(),
    }
}

/// Part of the bytes read that came from the cache; `None` before the first read.
fn hit_rate(stats: &Stats) -> Option<f64> {
    let hit = stats.blockcache.hit_bytes.get() as f64;
    let miss = stats.blockcache.miss_bytes.get() as f64;
    (hit + miss > 0.0).then(|| hit / (hit + miss))
}

/// A node in the output of `--json`.
#[derive(Serialize)]
struct NodeLine<'a> {
    name: &'a str,
    addresses: &'a [String],
    weight: u64,
    zone: &'a str,
    state: String,
    reasons: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    answer: Option<ReportedFigures<'a>>,
}

/// The part of a node's line that the node itself reports.
#[derive(Serialize)]
struct ReportedFigures<'a> {
    version: &'a str,
    rails: &'a [RailStatus],
    transports: &'a [String],
    disks: &'a [CacheDiskStatus],
    sources: &'a [String],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    origin_errors: &'a BTreeMap<String, String>,
    for_seconds: u64,
    used_bytes: u64,
    pinned_bytes: u64,
    capacity_bytes: u64,
    hit_rate: Option<f64>,
    send_bytes_per_second: f64,
    fetch_bytes_per_second: f64,
    stats: &'a Stats,
}

fn as_object(line: &NodeReport) -> Value {
    let NodeReport { member, answer } = line;
    let figures = answer.as_ref().ok();
    json!(NodeLine {
        name: &member.name,
        addresses: &member.addresses,
        // The registry knows only the address of some nodes.
        weight: figures.map_or(u64::from(member.weight), |figures| figures.status.weight),
        zone: &member.zone,
        state: node_state(line),
        reasons: reasons_of(line),
        error: answer.as_ref().err().map(ToString::to_string),
        answer: figures.map(reported_figures),
    })
}

fn reported_figures(figures: &NodeFigures) -> ReportedFigures<'_> {
    let NodeFigures { status, stats, sent, fetched } = figures;
    ReportedFigures {
        version: &status.version,
        rails: &status.rails,
        transports: &status.transports,
        disks: &status.disks,
        sources: &status.sources,
        origin_errors: &status.origin_errors,
        for_seconds: stats.usage.uptime_seconds.get(),
        used_bytes: stats.blockcache.used_bytes.get(),
        pinned_bytes: stats.blockcache.pinned_bytes.get(),
        capacity_bytes: stats.blockcache.capacity_bytes.get(),
        hit_rate: hit_rate(stats),
        send_bytes_per_second: sent.round(),
        fetch_bytes_per_second: fetched.round(),
        stats,
    }
}

const HEAD: [&str; 11] =
    ["NODE", "ZONE", "ADDRESS", "RAILS", "STATE", "SINCE", "WEIGHT", "USED", "HIT", "SENDS", "FETCHES"];

fn print_table(group: &str, lines: &[NodeReport]) {
    let rows: Vec<[String; 11]> = lines.iter().map(table_row).collect();
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(HEAD[column].len());
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let head: Vec<String> = HEAD.iter().zip(&widths).map(|(word, width)| format!("{word:width$}")).collect();
    anstream::println!("{BOLD}{}{BOLD:#}", head.join("  ").trim_end());
    for (row, line) in rows.iter().zip(lines) {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let style = match (column, &line.answer) {
                (4, Err(_)) => RED,
                (4, Ok(_)) if cell != "up" => YELLOW,
                (4, Ok(_)) => GREEN,
                (0, _) => BOLD,
                _ => Style::new(),
            };
            format!("{style}{cell:width$}{style:#}")
        });
        anstream::println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        if let Err(error) = &line.answer {
            anstream::println!("  {RED}{error}{RED:#}");
        }
        for reason in reasons_of(line) {
            anstream::println!("  {YELLOW}{}{YELLOW:#}", printable(reason.as_bytes()));
        }
    }
    let up: Vec<&NodeFigures> = lines.iter().filter_map(|line| line.answer.as_ref().ok()).collect();
    let used: u64 = up.iter().map(|answer| answer.stats.blockcache.used_bytes.get()).sum();
    let capacity: u64 = up.iter().map(|answer| answer.stats.blockcache.capacity_bytes.get()).sum();
    let pinned: u64 = up.iter().map(|answer| answer.stats.blockcache.pinned_bytes.get()).sum();
    let pinned = match pinned {
        0 => String::new(),
        bytes => format!(", {} of it pinned", human_bytes(bytes)),
    };
    let sent: f64 = up.iter().map(|answer| answer.sent).sum();
    anstream::println!(
        "group {group}: {} of {} nodes up, {} of {} used{pinned}, {}/s to readers",
        up.len(),
        lines.len(),
        human_bytes(used),
        human_bytes(capacity),
        human_bytes(sent as u64),
    );
    // The node that leads counts for all.
    for answer in up {
        if let Some(words) = stage::unsaved_words(&answer.stats) {
            anstream::println!("{words}: spurline status --unsaved lists them");
        }
    }
}

fn table_row(line: &NodeReport) -> [String; 11] {
    let NodeReport { member, answer } = line;
    let address = member.addresses.first().cloned().unwrap_or_else(dash);
    let zone = if member.zone.is_empty() { dash() } else { member.zone.clone() };
    let Ok(NodeFigures { status, stats, sent, fetched }) = answer else {
        let mut row = [const { String::new() }; 11].map(|_| dash());
        row[0] = member.name.clone();
        row[1] = zone;
        row[2] = address;
        row[4] = "down".to_owned();
        row[6] = member.weight.to_string();
        return row;
    };
    let cache = &stats.blockcache;
    let rails: Vec<&str> = status.rails.iter().map(|rail| rail.interface.as_str()).collect();
    [
        member.name.clone(),
        zone,
        address,
        if rails.is_empty() { "tcp".to_owned() } else { rails.join(":") },
        if status.weight == 0 { "draining".to_owned() } else { node_state(line) },
        time(stats.usage.uptime_seconds.get()),
        status.weight.to_string(),
        format!("{} of {}", human_bytes(cache.used_bytes.get()), human_bytes(cache.capacity_bytes.get())),
        hit_rate(stats).map_or_else(dash, |rate| format!("{:.0} %", rate * 100.0)),
        format!("{}/s", human_bytes(*sent as u64)),
        format!("{}/s", human_bytes(*fetched as u64)),
    ]
}

fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_observe::documents::NodeStatus;
    use spurline_types::Member;
    use std::sync::Arc;

    #[test]
    fn a_node_that_cannot_reach_its_origin_says_so() {
        let origin_errors = BTreeMap::from([("s3://b".to_owned(), "no route".to_owned())]);
        let status = NodeStatus { origin_errors, ..NodeStatus::default() };
        let answer = Ok(NodeFigures { status, stats: Stats::default(), sent: 0.0, fetched: 0.0 });
        let line = NodeReport { member: Arc::new(Member::from_address("10.0.0.1:7000", 100)), answer };
        let shown = as_object(&line);
        assert_eq!((&shown["state"], &shown["reasons"]), (&json!("degraded"), &json!(["s3://b: no route"])));
        assert_eq!(shown["origin_errors"]["s3://b"], "no route");
    }
}
