//! `spurline status`: one line for each mount and node, and for each cache disk.

use crate::cli::StatusArgs;
use crate::degraded::{STATE_UP, degraded_reasons, state_with};
use crate::report::{printable, printable_json};
use anstyle::{AnsiColor, Style};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_runtime::describe_losses;
use spurline_runtime::locator::{ANSWER, NamedProcess, all_processes, find_process};
use spurline_types::units::human_bytes;
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const GREEN: Style = AnsiColor::Green.on_default();
const BOLD: Style = Style::new().bold();
/// The state of a node that no request was sent to.
const NOT_USED_YET: &str = "not used yet";
/// The most NFS clients that a line names.
const CLIENTS_SHOWN: usize = 8;

/// Runs the command; exit code 1 when one target does not answer or does not work as it should, 3 when no named target does, or none is accessible.
///
/// # Errors
/// When no target can be queried.
pub fn run(args: StatusArgs) -> Result<ExitCode, Fault> {
    let names = args.target;
    if args.said.registry && !names.is_empty() {
        return Err(Fault::usage(
            format!("{} and --registry exclude each other", names.join(", ")),
            "--registry shows all nodes of a group; name targets without it",
        ));
    }
    // A registry from the environment gives way to named targets.
    if let Some(registry) = args.registry.filter(|_| names.is_empty()) {
        let trust = args.trust.check()?;
        return crate::group_status::run(&registry, &args.cache_group, &trust, args.json);
    }
    let all = names.is_empty();
    let asked: Vec<NamedProcess> = match all {
        true => all_processes()?,
        false => names
            .into_iter()
            .map(|name| {
                let peer = find_process(&name);
                (name, peer)
            })
            .collect(),
    };
    if asked.is_empty() {
        return Err(Fault::failed(
            "nothing of spurline runs on this machine for this user",
            "spurline mount, or name a node",
        ));
    }
    let (mut all_well, mut any_well, mut all_theirs, mut first) = (true, false, true, None);
    for (name, peer) in asked {
        // Another user's mount may not be queried. Unless it was named, that is no failure as long as others answer.
        let theirs = peer.as_ref().is_err_and(|absent| absent.may_run);
        let answer = peer.map_err(|absent| absent.fault).and_then(|peer| {
            let mut status = peer.fetch_status(ANSWER)?;
            let reasons = degraded_reasons(&status);
            status["state"] = state_with(&status, &reasons).into();
            status["reasons"] = reasons.into();
            Ok((status, peer.fetch_stats(ANSWER)?))
        });
        all_well &= match &answer {
            Ok((status, _)) => status["state"] == STATE_UP,
            Err(_) => theirs && all,
        };
        any_well |= answer.is_ok();
        all_theirs &= theirs;
        first = first.or(answer.as_ref().err().map(|fault| fault.code));
        status_text(&name, answer, if theirs { "unknown" } else { "down" }, args.json);
    }
    Ok(match first {
        Some(code) if !any_well && (!all || all_theirs) => ExitCode::from(code as u8),
        _ => ExitCode::from(u8::from(!all_well)),
    })
}

/// One line of text or JSON; `unanswered` is the state of a target that did not answer.
fn status_text(name: &str, answer: Result<(Value, Value), Fault>, unanswered: &str, as_json: bool) {
    let shown = printable(name.as_bytes());
    match answer {
        Err(fault) if as_json => {
            anstream::println!("{}", json!({"target": name, "state": unanswered, "error": fault.to_string()}))
        }
        Err(fault) => {
            let why = printable(fault.to_string().as_bytes());
            anstream::println!("{BOLD}{shown}{BOLD:#}  {RED}{unanswered}{RED:#}  {why}");
        }
        Ok((mut status, stats)) if as_json => {
            if let Some(object) = status.as_object_mut() {
                object.insert("target".into(), name.into());
                object.insert("stats".into(), stats);
            }
            anstream::println!("{status}");
        }
        Ok((status, stats)) => {
            // The answer may come from another user's process.
            let status = printable_json(status);
            let state = status["state"].as_str().unwrap_or("up");
            let kind = status["kind"].as_str().unwrap_or("process");
            let cache = &stats["blockcache"];
            let number = |v: &Value| v.as_u64().unwrap_or(0);
            let style = state_style(state);
            let cache = cache_words(&status, number(&cache["used_bytes"]), number(&cache["capacity_bytes"]));
            anstream::println!("{BOLD}{shown}{BOLD:#}  {style}{state}{style:#}  {kind}  {cache}");
            let metadata = &stats["metadata"];
            if number(&metadata["silent_origins"]) > 0 {
                let stale = number(&metadata["stale_answers"]);
                anstream::println!(
                    "  origin: does not respond; last known names and attributes served so far: {stale} \
                     (--stale-if-error)"
                );
            }
            for key in ["source", "sources", "registry", "addresses", "weight", "fuse", "metrics", "pid"] {
                match &status[key] {
                    Value::Null => {}
                    Value::String(text) => anstream::println!("  {key}: {text}"),
                    Value::Array(many) => {
                        let many: Vec<_> = many.iter().filter_map(Value::as_str).collect();
                        anstream::println!("  {key}: {}", many.join(", "));
                    }
                    other => anstream::println!("  {key}: {other}"),
                }
            }
            if let Some(line) = writes_line(&status["writes"], &stats) {
                anstream::println!("  writes: {line}");
            }
            if let Some(line) = export_line(&status["export"]) {
                anstream::println!("  export: {line}");
            }
            show_group(&status["group"]);
            for rail in status["rails"].as_array().into_iter().flatten() {
                let text = |k: &str| rail[k].as_str().unwrap_or("?");
                let numa = rail["numa_node"].as_u64().map_or(String::new(), |node| format!(", NUMA node {node}"));
                let (interface, device, link, address) =
                    (text("interface"), text("device"), text("link"), text("address"));
                anstream::println!("  rail {interface}  {link} of {device}{numa} at {address}");
            }
            for disk in status["disks"].as_array().into_iter().flatten() {
                anstream::println!("  {}", disk_line(disk));
            }
            for peer in status["peers"].as_array().into_iter().flatten() {
                anstream::println!("  {}", peer_line(peer));
                show_paths(peer);
            }
            for (source, error) in status["origin_errors"].as_object().into_iter().flatten() {
                anstream::println!("  {RED}{source}: {}{RED:#}", error.as_str().unwrap_or_default());
            }
        }
    }
}

fn state_style(state: &str) -> Style {
    match state {
        STATE_UP | "normal" => GREEN,
        "degraded" | NOT_USED_YET => YELLOW,
        _ => RED,
    }
}

/// A cache disk with its state, and the reason if that is not normal.
fn disk_line(disk: &Value) -> String {
    let state = disk["state"].as_str().unwrap_or("?");
    let style = state_style(state);
    let why = disk["reason"].as_str().filter(|why| !why.is_empty()).map_or(String::new(), |why| format!("  {why}"));
    format!("disk {}  {style}{state}{style:#}{why}", disk["path"].as_str().unwrap_or("?"))
}

/// A node of a mount with its state: the transport of its data, or the reason why it is down.
fn peer_line(peer: &Value) -> String {
    let state = match peer["state"].as_str() {
        // No request has gone there, so there is neither a connection nor a failure.
        Some("unknown") => NOT_USED_YET,
        state => state.unwrap_or("?"),
    };
    let style = state_style(state);
    let more = match state {
        NOT_USED_YET => String::new(),
        "down" => format!("  {}", peer["reason"].as_str().unwrap_or_default()),
        _ => peer["transport"].as_str().map_or(String::new(), |transport| {
            let from = local_ends(&peer["local"]);
            format!("  data over {transport}{from}")
        }),
    };
    format!("peer {}  {style}{state}{style:#}{more}", peer["address"].as_str().unwrap_or("?"))
}

/// What the cache disks of a process hold.
fn cache_words(status: &Value, used: u64, capacity: u64) -> String {
    if status["kind"] == "mount" && status["writes"]["writable"] == true {
        return "no block cache (--rw)".to_owned();
    }
    let has_nodes = status["peers"].as_array();
    match capacity {
        0 if status["kind"] == "mount" && !has_nodes.is_none_or(Vec::is_empty) => "cache on its nodes".to_owned(),
        0 => "no cache disk".to_owned(),
        _ => format!("cache {} of {}", human_bytes(used), human_bytes(capacity)),
    }
}

/// The writing side of a mount or a node; `None` where it takes no changes.
fn writes_line(writes: &Value, stats: &Value) -> Option<String> {
    if writes["writable"] != true {
        return None;
    }
    let number = |v: &Value| v.as_u64().unwrap_or(0);
    if let (Some(sessions), Some(files)) = (writes["sessions"].as_u64(), writes["open_files"].as_u64()) {
        return Some(format!("taken from mounts with --rw; {sessions} connected, {files} open files"));
    }
    let (fuse, behind) = (&stats["fuse"], &stats["writes"]);
    let (made, written) = (number(&fuse["change_ops"]), human_bytes(number(&fuse["write_bytes"])));
    let done = format!("{made} changes made, {written} written by requests");
    if writes["through_nodes"] != true {
        return Some(format!("straight to the source; {done}"));
    }
    let bytes = |name: &str| human_bytes(number(&behind[name]));
    let (dirty, memory, limit) = (bytes("dirty_bytes"), bytes("memory_bytes"), bytes("memory_limit_bytes"));
    let failed = match number(&behind["failures"]) {
        0 => String::new(),
        n => format!("; {RED}{n} writes refused by the source after close or write had returned{RED:#}"),
    };
    let lost = describe_losses(&writes["behind"]).map(|lost| format!("; {RED}{lost}{RED:#}")).unwrap_or_default();
    Some(format!("through nodes; {done}; {dirty} on the way, {memory} of {limit} held until durable{failed}{lost}"))
}

/// The NFS export of a mount; `None` where there is none.
fn export_line(export: &Value) -> Option<String> {
    export["id"].as_str()?;
    let number = |name: &str| export[name].as_u64().unwrap_or(0);
    if export["active"] != true {
        let why =
            if number("threads") == 0 { "the NFS server does not run" } else { "the NFS server has no client of it" };
        return Some(format!("{why}; `spurline export MOUNTPOINT` shows its requirements"));
    }
    let over = if export["rdma"] == true { "TCP and RDMA" } else { "TCP" };
    let mode = if export["writable"] == true { "writable" } else { "read-only" };
    let clients: Vec<&str> = export["clients"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let shown = clients.iter().take(CLIENTS_SHOWN).copied().collect::<Vec<_>>().join(", ");
    let more = clients.len().saturating_sub(CLIENTS_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let list = if clients.is_empty() { String::new() } else { format!(" ({shown}{more})") };
    let (read, written) = (human_bytes(number("read_bytes")), human_bytes(number("write_bytes")));
    let stale = match number("stale_handles") {
        0 => String::new(),
        n => format!("; {RED}{n} stale file handles{RED:#}"),
    };
    let count = if clients.len() == 1 { "1 client".to_owned() } else { format!("{} clients", clients.len()) };
    Some(format!(
        "{mode} by NFS over {over}, {count}{list}; {read} read, {written} written; {} threads{stale}",
        number("threads")
    ))
}

/// The local addresses of a peer's connections: ` from 10.0.0.1 on ib0, 10.0.1.1 on ib1`.
fn local_ends(local: &Value) -> String {
    let one = |end: &Value| {
        let on = end["interface"].as_str().map_or(String::new(), |name| format!(" on {name}"));
        Some(format!("{}{on}", end["address"].as_str()?))
    };
    let all: Vec<String> = local.as_array().into_iter().flatten().filter_map(one).collect();
    if all.is_empty() { String::new() } else { format!(" from {}", all.join(", ")) }
}

/// The state of the registry of a mount or a node.
fn show_group(group: &Value) {
    let Some(registry) = group["registry"].as_str() else { return };
    let state = group["state"].as_str().unwrap_or("?");
    let style = if state == "up" { GREEN } else { RED };
    let time = group["for_seconds"].as_u64().map_or(String::new(), |seconds| format!(" for {seconds} s"));
    let why = group["reason"].as_str().map_or(String::new(), |why| format!("  {why}"));
    anstream::println!("  registry {registry}  {style}{state}{style:#}{time}{why}");
}

/// The paths to one peer, or why there is none.
fn show_paths(peer: &Value) {
    for path in peer["paths"].as_array().into_iter().flatten() {
        let text = |k: &str| path[k].as_str().unwrap_or("?");
        let number = |k: &str| path[k].as_u64().unwrap_or(0);
        let style = if text("state") == "up" { GREEN } else { RED };
        let why = path["last_failure"].as_str().map_or(String::new(), |why| format!("  last failure: {why}"));
        let check = &path["speed_check"];
        let mb = |k: &str| check[k].as_u64().unwrap_or(0) / 1_000_000;
        let slower = match check["slower"].as_bool() {
            Some(true) => {
                let (before, after) = (mb("before_bytes_per_s"), mb("after_bytes_per_s"));
                format!("  {RED}slower than before it failed: {after} MB/s, {before} before{RED:#}")
            }
            _ => String::new(),
        };
        // A node that lost power sends no message, and idle paths are not probed.
        let heard = match path["silent_seconds"].as_u64() {
            Some(silent) if silent >= 60 => format!(", last heard of {silent} s ago"),
            _ => String::new(),
        };
        anstream::println!(
            "    {} {}  {style}{}{style:#} for {} s{heard}  {} channels, {} failovers, {} failbacks{slower}{why}",
            text("transport"),
            text("path"),
            text("state"),
            number("for_seconds"),
            number("channels"),
            number("failovers"),
            number("failbacks"),
        );
    }
    if let Some(why) = peer["no_paths"].as_str() {
        anstream::println!("    no RDMA path: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_a_cache_disk_shows_no_size() {
        let (alone, group) = (json!({"kind": "mount", "peers": []}), json!({"kind": "mount", "peers": [{}]}));
        assert_eq!(cache_words(&alone, 0, 0), "no cache disk");
        assert_eq!(cache_words(&group, 0, 0), "cache on its nodes");
        assert_eq!(cache_words(&alone, 1 << 20, 1 << 30), "cache 1.00 MiB of 1.00 GiB");
        let writable = json!({"kind": "mount", "peers": [{}], "writes": {"writable": true}});
        assert_eq!(cache_words(&writable, 0, 0), "no block cache (--rw)");
    }

    #[test]
    fn lines_of_disks_and_nodes_have_the_reason_of_their_state() {
        let plain = |line: String| anstream::adapter::strip_str(&line).to_string();
        let disk = json!({"path": "/c", "state": "unstable", "reason": "3 reads failed"});
        assert_eq!(plain(disk_line(&disk)), "disk /c  unstable  3 reads failed");
        assert_eq!(plain(disk_line(&json!({"path": "/c", "state": "normal", "reason": ""}))), "disk /c  normal");
        let peer = |state: &str, reason: &str| {
            plain(peer_line(&json!({"address": "n1:7000", "state": state, "reason": reason, "transport": "tcp"})))
        };
        assert_eq!(peer("unknown", ""), "peer n1:7000  not used yet");
        assert_eq!(peer("up", ""), "peer n1:7000  up  data over tcp");
        assert_eq!(peer("down", "connection refused"), "peer n1:7000  down  connection refused");
    }

    #[test]
    fn the_line_of_an_export() {
        assert_eq!(export_line(&Value::Null), None);
        let stopped = json!({"id": "a", "active": false, "threads": 0});
        assert!(export_line(&stopped).unwrap().contains("does not run"));
        let clients: Vec<String> = (1..=9).map(|n| format!("10.0.0.{n}")).collect();
        let served = json!({"id": "a", "active": true, "rdma": true, "writable": true, "clients": clients, "threads": 16,
            "read_bytes": 3 << 20, "write_bytes": 0, "stale_handles": 0});
        let line = export_line(&served).unwrap();
        assert!(line.starts_with("writable by NFS over TCP and RDMA, 9 clients (10.0.0.1, "), "{line}");
        assert!(line.ends_with(" and 1 more); 3.00 MiB read, 0 B written; 16 threads"), "{line}");
    }

    #[test]
    fn the_line_of_writes() {
        let stats = json!({"fuse": {"change_ops": 7, "write_bytes": 3 << 20}});
        assert_eq!(writes_line(&json!({"writable": false}), &stats), None);
        assert_eq!(writes_line(&Value::Null, &stats), None, "an older process");
        let line = writes_line(&json!({"writable": true, "through_nodes": false}), &stats).unwrap();
        assert_eq!(line, "straight to the source; 7 changes made, 3.00 MiB written by requests");
        let stats = json!({
            "fuse": {"change_ops": 7, "write_bytes": 3 << 20},
            "writes": {"dirty_bytes": 1 << 20, "memory_bytes": 2 << 20, "memory_limit_bytes": 100 << 20, "failures": 0}
        });
        let line = writes_line(&json!({"writable": true, "through_nodes": true}), &stats).unwrap();
        assert_eq!(
            line,
            "through nodes; 7 changes made, 3.00 MiB written by requests; 1.00 MiB on the way, 2.00 MiB of 100 MiB held \
             until durable"
        );
        let behind = json!({"lost_bytes": 2048, "lost_files": 1, "lost": [{"path": "f", "bytes": 2048}]});
        let line = writes_line(&json!({"writable": true, "through_nodes": true, "behind": behind}), &stats).unwrap();
        assert!(line.contains("lost, as no node took them: 2.00 KiB of written bytes: /f (2.00 KiB)"), "{line}");
        let line = writes_line(&json!({"writable": true, "sessions": 2, "open_files": 5}), &stats).unwrap();
        assert_eq!(line, "taken from mounts with --rw; 2 connected, 5 open files");
    }
}
