//! `spurline status --registry`: every node of a group, asked by itself over the connection its readers use. What a
//! registry does not know (used, rates, rails) nobody but the node can say.

use anstyle::{AnsiColor, Style};
use serde_json::{Value, json};
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_membership::{HoldTimes, RegistryFollower};
use spurline_net_tcp::SocketOptions;
use spurline_proto::NodeRequest;
use spurline_runtime::peers::Reach;
use spurline_runtime::rules::human_time as time;
use spurline_runtime::{group, setup};
use spurline_transport::{CallError, PathPool};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const GREEN: Style = AnsiColor::Green.on_default();
const BOLD: Style = Style::new().bold();

/// How long the registry may take to name the nodes.
const FIRST: Duration = Duration::from_secs(10);
/// How long a node may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two looks at the counters, out of which the rates are made.
const BETWEEN: Duration = Duration::from_secs(1);
/// Nodes asked at one time.
const AT_ONCE: usize = 64;

/// What one node said.
struct Line {
    member: Arc<Member>,
    answer: Result<Answer>,
}

struct Answer {
    status: Value,
    stats: Value,
    /// Bytes a second given to readers, and taken from the under-store.
    sent: f64,
    fetched: f64,
}

/// Prints all nodes; exit code 1 when one does not answer.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or knows no node.
pub fn run(registry: &Registry, name: &str, trust: &TrustConfig, as_json: bool) -> Result<ExitCode, Fault> {
    let stats = Arc::new(Stats::default());
    let host = group::hostname();
    let trust = setup::open_trust(trust, &host)?;
    let opened = spurline_membership::open_registry(registry, name, &trust)?;
    let follower = RegistryFollower::start(&opened, HoldTimes::default(), Arc::clone(&stats))?;
    let mut members = follower.first_members_once(Instant::now() + FIRST).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => "",
            ErrorKind::NotFound => {
                "is --cache-group right? else start a node with the same --registry and --cache-group; nodes that can't \
                 reach the registry go on serving, and 'spurline status MOUNTPOINT' of a mount says which"
            }
            _ => "start the registry, or correct --registry",
        };
        Fault::missing(format!("group {name}: {error}"), remedy)
    })?;
    members.sort_by(|a, b| (&a.zone, &a.name).cmp(&(&b.zone, &b.name)));
    let reach = Reach {
        trust,
        name: host,
        source: String::new(),
        locals: Vec::new(),
        socket: SocketOptions::default(),
        nconnect: 1,
        stats,
    };
    let lines = ask_all(&reach, members);
    let all_well = lines.iter().all(|line| line.answer.is_ok());
    for line in &lines {
        if as_json {
            anstream::println!("{}", as_object(line));
        }
    }
    if !as_json {
        table(name, &lines);
    }
    Ok(ExitCode::from(u8::from(!all_well)))
}

fn ask_all(reach: &Reach, members: Vec<Arc<Member>>) -> Vec<Line> {
    let next = AtomicUsize::new(0);
    let (next, members) = (&next, &members);
    let mut lines: Vec<(usize, Line)> = std::thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(member) = members.get(index) else { return done };
                done.push((index, Line { member: Arc::clone(member), answer: ask(reach, member) }));
            }
        };
        let threads: Vec<_> = (0..AT_ONCE.min(members.len())).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    lines.sort_by_key(|(index, _)| *index);
    lines.into_iter().map(|(_, line)| line).collect()
}

fn ask(reach: &Reach, member: &Member) -> Result<Answer> {
    let pool = reach.pool(member);
    let (first, at) = (look(&pool)?, Instant::now());
    std::thread::sleep(BETWEEN);
    let second = look(&pool)?;
    let seconds = at.elapsed().as_secs_f64();
    let rate = |section: &str, counter: &str| {
        let count = |value: &Value| value["stats"][section][counter].as_u64().unwrap_or(0);
        count(&second).saturating_sub(count(&first)) as f64 / seconds
    };
    let (sent, fetched) = (rate("remotecache", "send_bytes"), rate("object", "get_bytes"));
    Ok(Answer { status: second["status"].clone(), stats: second["stats"].clone(), sent, fetched })
}

/// What a node says of itself now.
fn look(pool: &PathPool) -> Result<Value> {
    let deadline = Instant::now() + ANSWER;
    let mut lease = pool.checkout(deadline)?;
    let mut body = Vec::new();
    let request = NodeRequest::Describe;
    lease.call(&request, &mut body, &mut [], &mut |_| {}, deadline).map_err(|error| match error {
        CallError::Answered(error) | CallError::Broken(error) => error,
    })?;
    let value: Value = serde_json::from_slice(&body)
        .map_err(|error| Error::new(ErrorKind::Protocol, format!("what the node says makes no sense: {error}")))?;
    if value["status"].is_null() {
        return Err(Error::new(ErrorKind::Unsupported, "the node is starting, or of a version that says nothing"));
    }
    Ok(value)
}

/// Part of what was read that was held already; `None` while nothing was read.
fn hit_rate(stats: &Value) -> Option<f64> {
    let count = |name: &str| stats["blockcache"][name].as_u64().unwrap_or(0) as f64;
    let (hit, miss) = (count("hit_bytes"), count("miss_bytes"));
    (hit + miss > 0.0).then(|| hit / (hit + miss))
}

fn as_object(line: &Line) -> Value {
    let Line { member, answer } = line;
    let mut out = json!({
        "name": member.name,
        "addresses": member.addresses,
        "weight": member.weight,
        "zone": member.zone,
        "state": if answer.is_ok() { "up" } else { "down" },
    });
    match answer {
        Err(error) => out["error"] = error.to_string().into(),
        Ok(Answer { status, stats, sent, fetched }) => {
            // A node that was listed by its address alone says the rest itself.
            for key in ["weight", "rails", "transports", "disks", "sources", "version"] {
                if !status[key].is_null() {
                    out[key] = status[key].clone();
                }
            }
            out["for_seconds"] = stats["usage"]["uptime_seconds"].clone();
            out["used_bytes"] = stats["blockcache"]["used_bytes"].clone();
            out["pinned_bytes"] = stats["blockcache"]["pinned_bytes"].clone();
            out["capacity_bytes"] = stats["blockcache"]["capacity_bytes"].clone();
            out["hit_rate"] = hit_rate(stats).into();
            out["send_bytes_per_second"] = sent.round().into();
            out["fetch_bytes_per_second"] = fetched.round().into();
            out["stats"] = stats.clone();
        }
    }
    out
}

const HEAD: [&str; 11] =
    ["NODE", "ZONE", "ADDRESS", "RAILS", "STATE", "SINCE", "WEIGHT", "USED", "HIT", "SENDS", "FETCHES"];

fn table(group: &str, lines: &[Line]) {
    let rows: Vec<[String; 11]> = lines.iter().map(row).collect();
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
    }
    let up: Vec<&Answer> = lines.iter().filter_map(|line| line.answer.as_ref().ok()).collect();
    let sum = |name: &str| -> u64 { up.iter().filter_map(|a| a.stats["blockcache"][name].as_u64()).sum() };
    let pinned = match sum("pinned_bytes") {
        0 => String::new(),
        bytes => format!(", {} of it pinned", human_bytes(bytes)),
    };
    let sent: f64 = up.iter().map(|answer| answer.sent).sum();
    anstream::println!(
        "group {group}: {} of {} nodes up, {} of {} used{pinned}, {}/s to readers",
        up.len(),
        lines.len(),
        human_bytes(sum("used_bytes")),
        human_bytes(sum("capacity_bytes")),
        human_bytes(sent as u64),
    );
}

fn row(line: &Line) -> [String; 11] {
    let Line { member, answer } = line;
    let dash = || "-".to_owned();
    let address = member.addresses.first().cloned().unwrap_or_else(dash);
    let zone = if member.zone.is_empty() { dash() } else { member.zone.clone() };
    let Ok(Answer { status, stats, sent, fetched }) = answer else {
        let mut row = [const { String::new() }; 11].map(|_| dash());
        (row[0], row[1], row[2], row[4]) = (member.name.clone(), zone, address, "down".to_owned());
        row[6] = member.weight.to_string();
        return row;
    };
    let number = |name: &str| stats["blockcache"][name].as_u64().unwrap_or(0);
    let rails: Vec<&str> =
        status["rails"].as_array().into_iter().flatten().filter_map(|rail| rail["interface"].as_str()).collect();
    let weight = status["weight"].as_u64().unwrap_or(u64::from(member.weight));
    let sick = number("disks_down") + number("disks_unstable");
    [
        member.name.clone(),
        zone,
        address,
        if rails.is_empty() { "tcp".to_owned() } else { rails.join(":") },
        match (weight, sick) {
            (0, _) => "draining".to_owned(),
            (_, 0) => "up".to_owned(),
            (_, 1) => "1 disk bad".to_owned(),
            (_, sick) => format!("{sick} disks bad"),
        },
        time(stats["usage"]["uptime_seconds"].as_u64().unwrap_or(0)),
        weight.to_string(),
        format!("{} of {}", human_bytes(number("used_bytes")), human_bytes(number("capacity_bytes"))),
        hit_rate(stats).map_or_else(dash, |rate| format!("{:.0} %", rate * 100.0)),
        format!("{}/s", human_bytes(*sent as u64)),
        format!("{}/s", human_bytes(*fetched as u64)),
    ]
}
