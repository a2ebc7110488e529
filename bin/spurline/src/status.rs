//! `spurline status`: a line for each mount and node, and for each cache disk.

use crate::cli::StatusArgs;
use crate::degraded::{degraded_reasons, state_with};
use crate::report::{printable, printable_json};
use crate::stage;
use anstyle::{AnsiColor, Style};
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_observe::client::AdminPeer;
use spurline_observe::documents::{
    CacheDiskStatus, DISK_NORMAL, ExportStatus, KeeperStatus, LocalEnd, MountStatus, MountWrites, NodeStatus,
    NodeWrites, PEER_DOWN, PEER_UNKNOWN, PEER_UP, PathSpeedCheck, PathStatus, PeerStatus, ProcessRole, ProcessStatus,
    RailStatus, RegistryStatus, STATE_UP,
};
use spurline_runtime::locator::{
    NamedProcess, PROCESS_ANSWER_LIMIT, ProcessAbsence, all_processes, find_process, is_foreign,
    may_have_processes_of_root,
};
use spurline_runtime::{describe_losses, describe_unsent};
use spurline_types::Stats;
use spurline_types::units::human_bytes;
use std::collections::BTreeMap;
use std::process::ExitCode;

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const GREEN: Style = AnsiColor::Green.on_default();
const BOLD: Style = Style::new().bold();
/// The state of a named path that is in no mount.
const NO_TARGET: &str = "no target";
/// The state of a node that no request was sent to.
const NOT_USED_YET: &str = "not used yet";
/// The most NFS clients that a line names.
const CLIENTS_SHOWN: usize = 8;

/// Runs the command; exit code 1 when a target does not answer or does not work well, 3 when no named target does, or no target is accessible.
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
        let trust = args.trust.check(false)?;
        if args.unsaved {
            return stage::list_unsaved(&registry, &args.cache_group, &trust, args.json);
        }
        return crate::group_status::run(&registry, &args.cache_group, &trust, args.json);
    }
    if args.unsaved {
        return Err(Fault::usage(
            "--unsaved without --registry: the nodes of a group keep the staged files",
            "give --registry coordinator://HOST:PORT or etcd://HOST:PORT, and --cache-group",
        ));
    }
    let all = names.is_empty();
    let asked: Vec<NamedProcess> = if all {
        all_processes()?
    } else {
        names
            .into_iter()
            .map(|name| {
                let peer = find_process(&name);
                (name, peer)
            })
            .collect()
    };
    if all && asked.iter().all(|(_, peer)| is_foreign(peer)) {
        return Err(nothing_runs(&asked));
    }
    let mut all_well = true;
    let mut any_well = false;
    let mut all_may_run = true;
    let mut first = None;
    for (name, peer) in asked {
        // Another user's mount is none of this user's business, unless it was named.
        if all && is_foreign(&peer) {
            continue;
        }
        let absence = peer.as_ref().err().map(|absent| absent.absence);
        // For a mount that was not named, that is no failure as long as others answer.
        let may_run = matches!(absence, Some(ProcessAbsence::OutOfReach | ProcessAbsence::OfUser(_)));
        let answer = peer.map_err(|absent| absent.fault).and_then(|peer| ProcessAnswer::fetch(&peer));
        all_well &= match &answer {
            Ok(answer) => answer.state == STATE_UP,
            Err(_) => may_run && all,
        };
        any_well |= answer.is_ok();
        all_may_run &= may_run;
        first = first.or(answer.as_ref().err().map(|fault| fault.code));
        // The name of a socket can't be given as a target.
        let name = answer.as_ref().ok().filter(|_| all).and_then(ProcessAnswer::address).unwrap_or(name);
        match answer {
            Ok(answer) if args.json => anstream::println!("{}", answer.into_json(&name)),
            Ok(answer) => answer.print_text(&name)?,
            Err(fault) => print_unanswered(&name, absence, &fault, args.json),
        }
    }
    Ok(match first {
        Some(code) if !any_well && (!all || all_may_run) => ExitCode::from(code as u8),
        _ => ExitCode::from(u8::from(!all_well)),
    })
}

/// Prints a target that does not answer, and in a second line what a user can do.
fn print_unanswered(name: &str, absence: Option<ProcessAbsence>, fault: &Fault, as_json: bool) {
    let state = match absence {
        Some(ProcessAbsence::OutOfReach | ProcessAbsence::OfUser(_)) => "unknown",
        Some(ProcessAbsence::NoTarget) => NO_TARGET,
        Some(ProcessAbsence::Ended) | None => "down",
    };
    if as_json {
        anstream::println!("{}", json!({"target": name, "state": state, "error": fault.to_string()}));
        return;
    }
    let name = printable(name.as_bytes());
    let why = printable(fault.what.as_bytes());
    anstream::println!("{BOLD}{name}{BOLD:#}  {RED}{state}{RED:#}  {why}");
    if !fault.remedy.is_empty() {
        anstream::println!("  {}", printable(fault.remedy.as_bytes()));
    }
}

/// The error where no process of this user runs, with what the user can use.
fn nothing_runs(others: &[NamedProcess]) -> Fault {
    let mounts: Vec<&str> = others.iter().map(|(name, _)| name.as_str()).collect();
    let mut uses = vec![
        "spurline mount SOURCE DIR makes a mount".to_owned(),
        "spurline status HOST:PORT queries a node".to_owned(),
    ];
    if !mounts.is_empty() {
        uses.push(format!("mounts of other users: {}", mounts.join(", ")));
    }
    if !mounts.is_empty() || may_have_processes_of_root() {
        uses.push("sudo spurline status shows the processes of all users".to_owned());
    }
    Fault::failed("nothing of spurline runs on this machine for this user", uses.join("; "))
}

/// The documents of a process that has answered.
struct ProcessAnswer {
    /// The status, as sent by the process.
    document: Value,
    /// The counters, as sent by the process.
    counters: Value,
    stats: Stats,
    state: String,
    reasons: Vec<String>,
}

impl ProcessAnswer {
    fn fetch(peer: &AdminPeer) -> Result<Self, Fault> {
        let document = peer.fetch_status_json(PROCESS_ANSWER_LIMIT)?;
        let status = ProcessStatus::from_json(&document)?;
        let mut reasons = degraded_reasons(&status);
        let counters = peer.fetch_stats_json(PROCESS_ANSWER_LIMIT)?;
        let stats = Stats::from_json(&counters)?;
        reasons.extend(stage::late_uploads(&stats));
        let state = state_with(status.state(), &reasons);
        Ok(ProcessAnswer { document, counters, stats, state, reasons })
    }

    /// The address of a node, a gateway or a coordinator, by which it can be named.
    fn address(&self) -> Option<String> {
        ProcessStatus::from_json(&self.document).ok()?.addresses().first().cloned()
    }

    /// Both documents in a single document, with the state.
    fn into_json(self, name: &str) -> Value {
        let mut document = self.document;
        document["target"] = name.into();
        document["state"] = self.state.into();
        document["reasons"] = self.reasons.into();
        document["stats"] = self.counters;
        document
    }

    fn print_text(self, name: &str) -> Result<(), Fault> {
        // The answer may come from another user's process.
        let document = printable_json(self.document);
        let status = ProcessStatus::from_json(&document)?;
        let stats = self.stats;
        let name = printable(name.as_bytes());
        let state = printable(self.state.as_bytes());
        let kind = document["kind"].as_str().unwrap_or("process");
        let style = state_style(&state);
        let cache = cache_words(&status, &stats);
        anstream::println!("{BOLD}{name}{BOLD:#}  {style}{state}{style:#}  {kind}  {cache}");
        if stats.metadata.silent_origins.get() > 0 {
            let stale = stats.metadata.stale_answers.get();
            anstream::println!(
                "  origin: does not respond; last known names and attributes served so far: {stale} (--stale-if-error)"
            );
        }
        let waiting = stats.fuse.waiting_ops.get();
        if waiting > 0 {
            let seconds = stats.fuse.longest_wait_seconds.get();
            anstream::println!("  waiting: {waiting} requests of programs have no answer, the longest for {seconds} s");
        }
        if stats.metadata.etagless_buckets.get() > 0 {
            print_fact("versions", "of size and time in whole seconds, since the store's listings have no ETags");
        }
        print_facts(&status);
        match &status.role {
            ProcessRole::Mount(mount) => print_mount(mount, &stats),
            ProcessRole::Node(node) => {
                print_node(node);
                print_fact("staged files", &staged_line(&stats).unwrap_or_default());
                if let Some(late) = stage::late_uploads(&stats) {
                    anstream::println!("  {YELLOW}{late}{YELLOW:#}");
                }
            }
            ProcessRole::Gateway(gateway) => print_origin_errors(&gateway.origin_errors),
            ProcessRole::Coordinator(_) | ProcessRole::Other => {}
        }
        Ok(())
    }
}

fn print_facts(status: &ProcessStatus) {
    if let Some(mount) = status.mount() {
        print_fact("source", &mount.source);
    }
    if let ProcessRole::Node(node) = &status.role {
        print_fact("sources", &node.sources.join(", "));
    }
    if let ProcessRole::Gateway(gateway) = &status.role {
        print_fact("source", &gateway.source);
        print_fact("bucket", &gateway.bucket);
    }
    print_fact("addresses", &status.addresses().join(", "));
    if let ProcessRole::Node(node) = &status.role {
        print_fact("weight", &node.weight.to_string());
    }
    if let Some(mount) = status.mount() {
        print_fact("fuse", &mount.fuse);
    }
    print_fact("metrics", status.metrics.as_deref().unwrap_or_default());
    print_fact("pid", &status.pid.map_or(String::new(), |pid| pid.to_string()));
}

/// A line with a name and a text; nothing without a text.
fn print_fact(name: &str, text: &str) {
    if !text.is_empty() {
        anstream::println!("  {name}: {text}");
    }
}

fn print_mount(mount: &MountStatus, stats: &Stats) {
    print_fact("writes", &mount_writes_line(&mount.writes, stats).unwrap_or_default());
    print_fact("export", &mount.export.as_ref().map(export_line).unwrap_or_default());
    print_fact("keeper", &mount.keeper.as_deref().map(keeper_line).unwrap_or_default());
    if let Some(group) = &mount.group {
        print_registry(&group.registry);
    }
    for disk in &mount.disks {
        anstream::println!("  {}", disk_line(disk));
    }
    print_origin_errors(&mount.origin_errors);
    for peer in &mount.peers {
        anstream::println!("  {}", peer_line(peer));
        print_paths(peer);
    }
}

fn print_node(node: &NodeStatus) {
    print_fact("writes", &node_writes_line(&node.writes).unwrap_or_default());
    if let Some(group) = &node.group {
        print_registry(&group.registry);
    }
    for rail in &node.rails {
        let numa = rail.numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
        let RailStatus { interface, device, link, address, .. } = rail;
        anstream::println!("  rail {interface}  {link} of {device}{numa} at {address}");
    }
    for disk in &node.disks {
        anstream::println!("  {}", disk_line(disk));
    }
    print_origin_errors(&node.origin_errors);
}

/// A line for each source that does not serve the process.
fn print_origin_errors(errors: &BTreeMap<String, String>) {
    for (source, error) in errors {
        anstream::println!("  {RED}{source}: {error}{RED:#}");
    }
}

fn state_style(state: &str) -> Style {
    match state {
        STATE_UP | DISK_NORMAL => GREEN,
        "degraded" | NOT_USED_YET => YELLOW,
        _ => RED,
    }
}

/// A cache disk with the state, and the reason if that is not normal.
fn disk_line(disk: &CacheDiskStatus) -> String {
    let CacheDiskStatus { path, state, reason, .. } = disk;
    let style = state_style(state);
    let why = if reason.is_empty() { String::new() } else { format!("  {reason}") };
    format!("disk {path}  {style}{state}{style:#}{why}")
}

/// A node of a mount with the state: the transport of data, or the reason why the node is down.
fn peer_line(peer: &PeerStatus) -> String {
    // No request has gone to an unknown node, so there is neither a connection nor a failure.
    let state = if peer.state == PEER_UNKNOWN { NOT_USED_YET } else { &peer.state };
    let style = state_style(state);
    let more = match (&peer.used, state) {
        (_, NOT_USED_YET) | (None, _) => String::new(),
        (Some(_), PEER_DOWN) => format!("  {}", peer.reason()),
        (Some(used), _) => format!("  data over {}{}", used.transport, local_ends(&peer.local)),
    };
    format!("peer {}  {style}{state}{style:#}{more}", peer.address)
}

/// The content of the cache disks of a process.
fn cache_words(status: &ProcessStatus, stats: &Stats) -> String {
    let used = stats.blockcache.used_bytes.get();
    let capacity = stats.blockcache.capacity_bytes.get();
    let mount = status.mount();
    if mount.is_some_and(|mount| mount.writes.writable && !mount.writes.through_nodes) && capacity == 0 {
        "no block cache (--rw)".to_owned()
    } else if capacity > 0 {
        format!("cache {} of {}", human_bytes(used), human_bytes(capacity))
    } else if mount.is_some_and(|mount| !mount.peers.is_empty()) {
        "cache on its nodes".to_owned()
    } else {
        "no cache disk".to_owned()
    }
}

/// What a node keeps of staged files; `None` where the node keeps none.
fn staged_line(stats: &Stats) -> Option<String> {
    let size = stats.stage.size_bytes.get();
    let words = stage::unsaved_words(stats).map(|words| format!("; {words} in the group")).unwrap_or_default();
    (size > 0).then(|| format!("{} of {}{words}", human_bytes(stats.stage.used_bytes.get()), human_bytes(size)))
}

/// The writing side of a node; `None` where the node takes no changes.
fn node_writes_line(writes: &NodeWrites) -> Option<String> {
    let NodeWrites { writable, sessions, open_files } = writes;
    writable.then(|| format!("taken from mounts with --rw; {sessions} connected, {open_files} open files"))
}

/// The writing side of a mount; `None` where the mount takes no changes.
fn mount_writes_line(writes: &MountWrites, stats: &Stats) -> Option<String> {
    if !writes.writable {
        return None;
    }
    let made = stats.fuse.change_ops.get();
    let written = human_bytes(stats.fuse.write_bytes.get());
    let done = format!("{made} changes made, {written} written by requests");
    let lost = writes.behind.as_ref().and_then(describe_losses);
    let lost = lost.map(|lost| format!("; {RED}{lost}{RED:#}")).unwrap_or_default();
    let unpublished = writes.behind.as_ref().filter(|behind| behind.publishes).and_then(describe_unsent);
    let unpublished = unpublished
        .map(|unsent| format!("; not published yet: {}", printable(unsent.bytes.as_bytes())))
        .unwrap_or_default();
    let publishes = writes.behind.as_ref().is_some_and(|behind| behind.publishes);
    let failed = match stats.writes.failures.get() {
        0 => String::new(),
        n if publishes => format!("; {RED}changes of files not published {n} times, see the log{RED:#}"),
        n => format!("; {RED}{n} writes refused by the source after close or write had returned{RED:#}"),
    };
    if !writes.through_nodes {
        return Some(format!("straight to the source; {done}{unpublished}{failed}{lost}"));
    }
    let dirty = human_bytes(stats.writes.dirty_bytes.get());
    let memory = human_bytes(stats.writes.memory_bytes.get());
    let limit = human_bytes(stats.writes.memory_limit_bytes.get());
    Some(format!(
        "through nodes; {done}; {dirty} on the way, {memory} of {limit} held until durable{unpublished}{failed}{lost}"
    ))
}

/// The keeper of a mount.
fn keeper_line(keeper: &KeeperStatus) -> String {
    let KeeperStatus { pid, alive, restarts, cause, pause_ms, .. } = keeper;
    if !alive {
        return format!("no keeper: process {pid} has ended, and the mount will not survive its process; mount again");
    }
    let restarts_line = match restarts {
        0 => "no restart so far".to_owned(),
        1 => format!("1 restart after {cause}, with a pause of {pause_ms} ms"),
        restarts => format!("{restarts} restarts, the last after {cause}, with a pause of {pause_ms} ms"),
    };
    match keeper.not_kept {
        0 => format!("process {pid}; {restarts_line}"),
        missing => {
            format!("process {pid}; {restarts_line}; {missing} names and open files do not survive, for want of room")
        }
    }
}

/// The NFS export of a mount.
fn export_line(export: &ExportStatus) -> String {
    if !export.active {
        let why =
            if export.threads == 0 { "the NFS server does not run" } else { "the NFS server has no client of it" };
        return format!("{why}; `spurline export MOUNTPOINT` shows its requirements");
    }
    let over = if export.rdma { "TCP and RDMA" } else { "TCP" };
    let mode = if export.writable { "writable" } else { "read-only" };
    let clients: Vec<&str> = export.clients.iter().map(String::as_str).collect();
    let shown = clients.iter().take(CLIENTS_SHOWN).copied().collect::<Vec<_>>().join(", ");
    let more = clients.len().saturating_sub(CLIENTS_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let list = if clients.is_empty() { String::new() } else { format!(" ({shown}{more})") };
    let read = human_bytes(export.read_bytes);
    let written = human_bytes(export.write_bytes);
    let stale = match export.stale_handles {
        0 => String::new(),
        n => format!("; {RED}{n} stale file handles{RED:#}"),
    };
    let count = if clients.len() == 1 { "1 client".to_owned() } else { format!("{} clients", clients.len()) };
    let threads = export.threads;
    format!("{mode} by NFS over {over}, {count}{list}; {read} read, {written} written; {threads} threads{stale}")
}

/// The local addresses of a peer's connections: ` from 10.0.0.1 on ib0, 10.0.1.1 on ib1`.
fn local_ends(local: &[LocalEnd]) -> String {
    let mut ends = Vec::new();
    for end in local {
        let on = end.interface.as_ref().map_or(String::new(), |name| format!(" on {name}"));
        ends.push(format!("{}{on}", end.address));
    }
    if ends.is_empty() { String::new() } else { format!(" from {}", ends.join(", ")) }
}

/// The state of the registry of a mount or a node.
fn print_registry(status: &RegistryStatus) {
    let RegistryStatus { registry, state, for_seconds, reason } = status;
    let style = if state == STATE_UP { GREEN } else { RED };
    let time = for_seconds.map_or(String::new(), |seconds| format!(" for {seconds} s"));
    let why = reason.as_ref().map_or(String::new(), |why| format!("  {why}"));
    anstream::println!("  registry {registry}  {style}{state}{style:#}{time}{why}");
}

/// The paths to a peer, or why there is none.
fn print_paths(peer: &PeerStatus) {
    for path in &peer.paths {
        anstream::println!("    {}", path_line(path));
    }
    if let Some(why) = peer.used.as_ref().and_then(|used| used.no_paths.as_ref()) {
        anstream::println!("    no RDMA path: {why}");
    }
}

fn path_line(status: &PathStatus) -> String {
    let PathStatus { path, transport, state, for_seconds, channels, failovers, failbacks, .. } = status;
    let style = if state == PEER_UP { GREEN } else { RED };
    let why = status.last_failure.as_ref().map_or(String::new(), |why| format!("  last failure: {why}"));
    let slower = match &status.speed_check {
        Some(PathSpeedCheck { before_bytes_per_s, after_bytes_per_s, slower: true }) => {
            let before = before_bytes_per_s / 1_000_000;
            let after = after_bytes_per_s / 1_000_000;
            format!("  {RED}slower than before it failed: {after} MB/s, {before} before{RED:#}")
        }
        _ => String::new(),
    };
    // A node that lost power sends no message, and idle paths are not probed.
    let heard = match status.silent_seconds {
        Some(silent) if silent >= 60 => format!(", last heard of {silent} s ago"),
        _ => String::new(),
    };
    format!(
        "{transport} {path}  {style}{state}{style:#} for {for_seconds} s{heard}  {channels} channels, {failovers} failovers, \
         {failbacks} failbacks{slower}{why}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_observe::documents::{FileByteCount, PeerUse, WritesBehind};

    fn mount_status(mount: MountStatus) -> ProcessStatus {
        ProcessStatus { role: ProcessRole::Mount(mount), pid: None, metrics: None }
    }

    #[test]
    fn a_process_without_a_cache_disk_shows_no_size() {
        let stats = Stats::default();
        let of_group = MountStatus { peers: vec![PeerStatus::default()], ..MountStatus::default() };
        let writes = MountWrites { writable: true, ..MountWrites::default() };
        let writable = mount_status(MountStatus { writes, ..MountStatus::default() });
        let through_nodes = MountWrites { writable: true, through_nodes: true, ..MountWrites::default() };
        let of_writable_group = mount_status(MountStatus { writes: through_nodes, ..of_group.clone() });
        assert_eq!(cache_words(&of_writable_group, &stats), "cache on its nodes");
        assert_eq!(cache_words(&writable, &stats), "no block cache (--rw)");
        assert_eq!(cache_words(&mount_status(MountStatus::default()), &stats), "no cache disk");
        assert_eq!(cache_words(&mount_status(of_group), &stats), "cache on its nodes");
        stats.blockcache.used_bytes.set(1 << 20);
        stats.blockcache.capacity_bytes.set(1 << 30);
        assert_eq!(cache_words(&mount_status(MountStatus::default()), &stats), "cache 1.00 MiB of 1.00 GiB");
        assert_eq!(cache_words(&writable, &stats), "cache 1.00 MiB of 1.00 GiB");
    }

    fn without_style(line: String) -> String {
        anstream::adapter::strip_str(&line).to_string()
    }

    #[test]
    fn lines_of_disks_and_nodes_have_the_reason_of_their_state() {
        let disk = |state: &str, reason: &str| {
            let path = "/c".to_owned();
            let state = state.to_owned();
            let reason = reason.to_owned();
            without_style(disk_line(&CacheDiskStatus { path, state, reason, ..CacheDiskStatus::default() }))
        };
        assert_eq!(disk("unstable", "3 reads failed"), "disk /c  unstable  3 reads failed");
        assert_eq!(disk("normal", ""), "disk /c  normal");
        let peer = |state: &str, reason: &str| {
            let used = PeerUse { reason: reason.to_owned(), transport: "tcp".to_owned(), no_paths: None };
            let address = "n1:7000".to_owned();
            let state = state.to_owned();
            without_style(peer_line(&PeerStatus { address, state, used: Some(used), ..PeerStatus::default() }))
        };
        assert_eq!(peer("unknown", ""), "peer n1:7000  not used yet");
        assert_eq!(peer("up", ""), "peer n1:7000  up  data over tcp");
        assert_eq!(peer("down", "connection refused"), "peer n1:7000  down  connection refused");
    }

    #[test]
    fn the_line_of_a_path_has_the_speed_after_a_failure() {
        let speed_check = PathSpeedCheck { before_bytes_per_s: 9_000_000, after_bytes_per_s: 2_000_000, slower: true };
        let path = PathStatus {
            path: "ib0-ib1".to_owned(),
            transport: "rdma".to_owned(),
            state: "up".to_owned(),
            channels: 2,
            silent_seconds: Some(61),
            last_failure: Some("timeout".to_owned()),
            speed_check: Some(speed_check),
            ..PathStatus::default()
        };
        assert_eq!(
            without_style(path_line(&path)),
            "rdma ib0-ib1  up for 0 s, last heard of 61 s ago  2 channels, 0 failovers, 0 failbacks  slower than before it failed: \
             2 MB/s, 9 before  last failure: timeout"
        );
    }

    #[test]
    fn the_line_of_an_export() {
        assert!(export_line(&ExportStatus::default()).contains("does not run"));
        let served = ExportStatus {
            active: true,
            rdma: true,
            writable: true,
            clients: (1..=9).map(|n| format!("10.0.0.{n}")).collect(),
            threads: 16,
            read_bytes: 3 << 20,
            ..ExportStatus::default()
        };
        let line = export_line(&served);
        assert!(line.starts_with("writable by NFS over TCP and RDMA, 9 clients (10.0.0.1, "), "{line}");
        assert!(line.ends_with(" and 1 more); 3.00 MiB read, 0 B written; 16 threads"), "{line}");
    }

    #[test]
    fn the_line_of_writes() {
        let stats = Stats::default();
        stats.fuse.change_ops.set(7);
        stats.fuse.write_bytes.set(3 << 20);
        stats.writes.dirty_bytes.set(1 << 20);
        stats.writes.memory_bytes.set(2 << 20);
        stats.writes.memory_limit_bytes.set(100 << 20);
        assert_eq!(mount_writes_line(&MountWrites::default(), &stats), None);
        let alone = MountWrites { writable: true, ..MountWrites::default() };
        let line = mount_writes_line(&alone, &stats).unwrap();
        assert_eq!(line, "straight to the source; 7 changes made, 3.00 MiB written by requests");
        stats.writes.failures.add(2);
        let publishes = WritesBehind { publishes: true, ..WritesBehind::default() };
        let line = mount_writes_line(&MountWrites { behind: Some(publishes), ..alone.clone() }, &stats).unwrap();
        assert!(line.contains("changes of files not published 2 times"), "{line}");
        stats.writes.failures.set(0);
        let through_nodes = MountWrites { through_nodes: true, ..alone };
        let line = mount_writes_line(&through_nodes, &stats).unwrap();
        assert_eq!(
            line,
            "through nodes; 7 changes made, 3.00 MiB written by requests; 1.00 MiB on the way, 2.00 MiB of 100 MiB held \
             until durable"
        );
        let lost = vec![FileByteCount { path: "f".to_owned(), bytes: 2048 }];
        let behind = WritesBehind { lost_bytes: 2048, lost_files: 1, lost, ..WritesBehind::default() };
        let line = mount_writes_line(&MountWrites { behind: Some(behind), ..through_nodes }, &stats).unwrap();
        assert!(line.contains("lost, as no node took them: 2.00 KiB of written bytes: /f (2.00 KiB)"), "{line}");
        assert_eq!(node_writes_line(&NodeWrites::default()), None);
        let line = node_writes_line(&NodeWrites { writable: true, sessions: 2, open_files: 5 }).unwrap();
        assert_eq!(line, "taken from mounts with --rw; 2 connected, 5 open files");
    }
}
