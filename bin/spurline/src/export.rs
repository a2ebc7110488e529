//! `spurline export`: the kernel's NFS server over a mount. The export crate knows the files, the changes and the
//! requirements.

use crate::net::facts::FromArgs;
use crate::net::table::{BAD, DIM, GOOD, HEAD, WARN};
use crate::report::printable;
use clap::Args;
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_export::{
    ExportPlan, ExportRecord, ExportService, MountFacts, NfsClientCounters, NfsMount, NfsServerCounters, NfsSettings,
    RequirementOutcome, RequirementState, ServerChange, ServerState, V3_LOCKS, apply_plan, check_requirements,
    client_mounts, exports_at, reach_of, remove_export, shown_path,
};
use spurline_fabric::HostFacts;
use spurline_observe::documents::LOCKS_OF_MOUNT;
use spurline_observe::locate::SpurlineMount;
use spurline_runtime::locator::{PROCESS_ANSWER_LIMIT, find_mount, locate_path, mount_process};
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Examples of --help.
pub const EXAMPLES: &str = "\
Without --apply and --remove nothing is changed: requirements, changes and the clients' commands are printed.

Examples:
  What would be done, and what clients type:
    spurline export /mnt/data --clients 10.0.0.0/24 --rdma
  Do it:
    spurline export /mnt/data --clients 10.0.0.0/24 --rdma --apply
  On a client, after mounting: which transport carries the data, and over how many connections:
    spurline export --check server1
  Take it back:
    spurline export /mnt/data --remove";

const DEFAULT_THREADS_MAX: usize = 64;

/// The arguments of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Mountpoint
    #[arg(required_unless_present = "check")]
    pub mountpoint: Option<PathBuf>,
    /// Clients that may mount it: networks, addresses, host names or *; --apply needs it [default: the networks of this host's
    /// interfaces, for the printed plan]
    #[arg(long, value_name = "CIDR[,…]", value_delimiter = ',', value_parser = parse_client)]
    pub clients: Vec<String>,
    /// Serve over RDMA too, at port 20049
    #[arg(long)]
    pub rdma: bool,
    /// Clients may write; the mount must be writable
    #[arg(long)]
    pub rw: bool,
    /// The root user of a client is root on the mount too; without it, an unprivileged user
    #[arg(long)]
    pub no_root_squash: bool,
    /// Threads of the NFS server, if it does not run yet; they only raise those of nfs.conf [default: those, else 2 for each
    /// processor, 8 to 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Print what would be done (the default)
    #[arg(long, group = "action")]
    pub print: bool,
    /// Do it
    #[arg(long, group = "action")]
    pub apply: bool,
    /// Take back what --apply has done
    #[arg(long, group = "action")]
    pub remove: bool,
    /// On a client: how the NFS mounts of this server carry their data
    #[arg(long, value_name = "HOST", group = "action", conflicts_with_all = ["mountpoint", "clients", "rdma", "rw"])]
    pub check: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A word of exports(5) that stands for clients.
fn parse_client(text: &str) -> Result<String, String> {
    let network = |address: &str, prefix: &str| {
        let most = match address.parse::<IpAddr>() {
            Ok(IpAddr::V4(_)) => 32,
            Ok(IpAddr::V6(_)) => 128,
            Err(_) => return Err(format!("{address} is no address")),
        };
        match (prefix.parse::<u8>(), prefix.parse::<Ipv4Addr>()) {
            (Ok(n), _) if n <= most => Ok(text.to_owned()),
            (_, Ok(mask)) if most == 32 && mask.to_bits().leading_ones() == mask.to_bits().count_ones() => {
                Ok(text.to_owned())
            }
            _ => Err(format!("/{prefix} is no prefix length from 0 to {most}")),
        }
    };
    if let Some((address, prefix)) = text.split_once('/') {
        return network(address, prefix);
    }
    // No host has a name of numbers alone.
    let looks_like_address = text.contains(':') || text.chars().all(|c| c.is_ascii_digit() || c == '.');
    if !text.is_empty() && looks_like_address {
        return text.parse::<IpAddr>().map(|_| text.to_owned()).map_err(|_| format!("{text} is no address"));
    }
    if !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || ".-_*?@[]".contains(c)) {
        Ok(text.to_owned())
    } else {
        Err("give a network (10.0.0.0/24), an address, a host name, @netgroup or *".into())
    }
}

/// Runs the command.
///
/// # Errors
/// When the path is no mount, a requirement is missing, or a change fails.
pub fn run(args: ExportArgs) -> Result<ExitCode, Fault> {
    if let Some(host) = &args.check {
        return check_client(host, args.json);
    }
    let mountpoint = args.mountpoint.as_deref().unwrap_or(Path::new("/"));
    let facts = HostFacts::read_from(&FromArgs { from: None }.tree()?);
    if args.remove {
        return take_back(&args, mountpoint);
    }
    if args.apply && args.clients.is_empty() {
        return Err(Fault::usage(
            format!("{} is not exported: --apply needs --clients, the hosts that may mount it", mountpoint.display()),
            format!("name them, such as {}", example_clients(&facts)),
        ));
    }
    let mount = find_mount(mountpoint)?;
    let plan = plan_of(&args, &mount, &facts)?;
    let host = ExportHost { server: ServerState::read(), settings: NfsSettings::read(Path::new("/")), facts };
    let seen = MountFacts {
        allow_other: mount.allow_other,
        read_only: mount.read_only,
        source_locks: sets_source_locks(&mount),
    };
    let exports = ExportRecord::read_all(Path::new("/"));
    let requirements = check_requirements(&plan, &seen, &host.server, &host.settings, &exports, &host.facts);
    let missing = requirements.iter().any(|r| r.state == RequirementState::Missing);
    let changes = plan.changes(&host.server, Path::new("/"));
    if !args.apply {
        show(&args, &plan, &requirements, &changes, &[], &host);
        return Ok(ExitCode::from(if missing { 3 } else { 0 }));
    }
    if let Some(first) = requirements.iter().find(|r| r.state == RequirementState::Missing) {
        return Err(Fault::missing(
            format!("{} can't be exported: {}: {}", plan.mountpoint.display(), first.name, first.evidence),
            first.remedy.clone(),
        ));
    }
    apply(&args, &plan, &requirements, host)
}

/// The state of this host before the plan.
struct ExportHost {
    server: ServerState,
    settings: NfsSettings,
    facts: HostFacts,
}

/// Whether the kernel sends locks of a mount to the mount's process. A process that does not answer counts as one with locks.
fn sets_source_locks(mount: &SpurlineMount) -> bool {
    let status = mount_process(mount)
        .map_err(|absent| absent.fault)
        .and_then(|peer| Ok(peer.fetch_status(PROCESS_ANSWER_LIMIT)?));
    !mount.read_only
        && !status
            .is_ok_and(|status| status.mount().and_then(|mount| mount.writes.locks.as_deref()) == Some(LOCKS_OF_MOUNT))
}

fn apply(
    args: &ExportArgs,
    plan: &ExportPlan,
    requirements: &[RequirementOutcome],
    mut host: ExportHost,
) -> Result<ExitCode, Fault> {
    let (_, peer) = locate_path(&plan.mountpoint)?;
    let mut made = Vec::new();
    let applied = apply_plan(plan, Path::new("/"), &mut || peer.prepare_export(PROCESS_ANSWER_LIMIT), &mut |change| {
        if !args.json {
            anstream::println!("{DIM}{}{DIM:#}", change.command_line());
        }
        made.push(change.clone());
    });
    let others = applied.map_err(|error| {
        let remedy = format!("`spurline export {} --remove` takes back what was done", plan.mountpoint.display());
        Fault::failed(error.message(), remedy)
    })?;
    host.server = ServerState::read();
    if plan.rdma && !host.server.serves_rdma() {
        return Err(Fault::failed(
            format!("the NFS server does not listen for RDMA: its ports are {}", host.server.ports.join(", ")),
            "see the kernel's log (dmesg) about rpcrdma; TCP works",
        ));
    }
    if !args.json {
        for line in &others {
            let line = printable(line.as_bytes());
            anstream::eprintln!("{WARN}other exports of this host{WARN:#}: {line}; this one is made");
        }
    }
    show(args, plan, requirements, &made, &others, &host);
    Ok(ExitCode::SUCCESS)
}

fn take_back(args: &ExportArgs, mountpoint: &Path) -> Result<ExitCode, Fault> {
    let root = Path::new("/");
    // The mount may be gone, or another may be there: then the record knows the export.
    let (mountpoint, source) = match find_mount(mountpoint) {
        Ok(mount) => (mount.mountpoint, Some(mount.source)),
        Err(_) => (std::path::absolute(mountpoint).unwrap_or_else(|_| mountpoint.to_owned()), None),
    };
    let at = mountpoint.display();
    let ids = exports_at(root, &mountpoint, source.as_deref());
    if ids.is_empty() {
        return Err(Fault::failed(
            format!("{at} is not exported by `spurline export`"),
            "`exportfs -v` lists all exports of this host",
        ));
    }
    let user = rustix::process::geteuid();
    if !user.is_root() {
        return Err(Fault::missing(
            format!("{at} stays exported: this is user {}", user.as_raw()),
            "run it as root: the NFS server belongs to the kernel",
        ));
    }
    let mut made = Vec::new();
    let removed = remove_export(&ids, &mountpoint, root, &mut |change| {
        if !args.json {
            anstream::println!("{DIM}{}{DIM:#}", change.command_line());
        }
        made.push(change.command_line());
    });
    let left =
        removed.map_err(|error| Fault::failed(error.message(), "run it again: what was not removed is still there"))?;
    if args.json {
        anstream::println!("{}", json!({ "changes": made, "left": left }));
    } else {
        anstream::println!("{GOOD}{at} is no longer exported by `spurline export`{GOOD:#}");
        left.iter().for_each(|line| anstream::println!("{WARN}left{WARN:#} {line}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The threads to ask for: the number on the command line; else a default, where neither nfs.conf nor a server of the
/// administrator has a number.
fn threads_of(args: &ExportArgs) -> Option<u32> {
    let root = Path::new("/");
    let processors = std::thread::available_parallelism().map_or(8, usize::from);
    let own = NfsSettings::read(root).sets_threads()
        || (ServerState::read_threads() > 0 && !spurline_export::started_server(root));
    args.threads.or_else(|| (!own).then_some((2 * processors).clamp(8, DEFAULT_THREADS_MAX) as u32))
}

fn plan_of(args: &ExportArgs, mount: &SpurlineMount, facts: &HostFacts) -> Result<ExportPlan, Fault> {
    let clients = if args.clients.is_empty() { own_networks(facts) } else { args.clients.clone() };
    if clients.is_empty() {
        return Err(Fault::usage("this host's interfaces have no networks", "name the clients: --clients 10.0.0.0/24"));
    }
    Ok(ExportPlan {
        shown_path: shown_path(&NfsSettings::read(Path::new("/")), &mount.mountpoint)?,
        mountpoint: mount.mountpoint.clone(),
        source: mount.source.clone(),
        writable_mount: !mount.read_only,
        clients,
        writable: args.rw,
        trust_root: args.no_root_squash,
        rdma: args.rdma,
        threads: threads_of(args),
    })
}

/// The flag for the networks of this host's interfaces.
fn example_clients(facts: &HostFacts) -> String {
    let networks = own_networks(facts);
    format!("--clients {}", if networks.is_empty() { "10.0.0.0/24".to_owned() } else { networks.join(",") })
}

/// The networks that this host's interfaces are in, loopback and link-local left out.
fn own_networks(facts: &HostFacts) -> Vec<String> {
    let (reach, _) = reach_of(facts);
    let mut networks: Vec<String> = Vec::new();
    for (ip, prefix) in facts.interfaces.iter().filter(|i| i.is_up).flat_map(|i| i.addresses.iter()) {
        if !reach.contains(ip) {
            continue;
        }
        let network = match ip {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(*prefix)).unwrap_or(0);
                IpAddr::V4((v4.to_bits() & mask).into())
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(*prefix)).unwrap_or(0);
                IpAddr::V6((v6.to_bits() & mask).into())
            }
        };
        let text = format!("{network}/{prefix}");
        if !networks.contains(&text) {
            networks.push(text);
        }
    }
    networks
}

fn show(
    args: &ExportArgs,
    plan: &ExportPlan,
    requirements: &[RequirementOutcome],
    changes: &[ServerChange],
    others: &[String],
    host: &ExportHost,
) {
    let server = &host.server;
    let settings = &host.settings;
    let (addresses, rails) = reach_of(&host.facts);
    let service = ExportService {
        v4: server.refusal_of("4.2", settings).is_none(),
        v3: server.refusal_of("3", settings).is_none(),
        v3_locks: requirements.iter().all(|r| r.name != V3_LOCKS),
        rdma_port: plan.rdma.then(|| server.rdma_port().unwrap_or(settings.rdma_port())),
    };
    let lines = client_mounts(&plan.shown_path, &addresses, &rails, service);
    if args.json {
        let requirements: Vec<Value> = requirements
            .iter()
            .map(|r| json!({ "name": r.name, "state": r.state.word(), "evidence": r.evidence, "remedy": r.remedy }))
            .collect();
        let changes: Vec<Value> = changes
            .iter()
            .map(|change| match change {
                ServerChange::Write { path, text } => {
                    json!({ "command": change.command_line(), "path": path, "text": text })
                }
                _ => json!({ "command": change.command_line() }),
            })
            .collect();
        let lines: Vec<Value> =
            lines.iter().map(|l| json!({ "title": l.title, "command": l.command, "note": l.note })).collect();
        anstream::println!(
            "{}",
            json!({
                "id": plan.id(),
                "fsid": plan.fsid(),
                "mountpoint": plan.mountpoint,
                "clients": plan.clients,
                "applied": args.apply,
                "requirements": requirements,
                "changes": changes,
                "other_exports": others,
                "mounts": lines,
                "server": server.to_json(),
            })
        );
        return;
    }
    if !args.apply {
        anstream::println!("{HEAD}Requirements{HEAD:#}");
        for r in requirements {
            let (word, style) = match r.state {
                RequirementState::Met => ("ok", GOOD),
                RequirementState::Limited => ("limited", WARN),
                RequirementState::Missing => ("missing", BAD),
            };
            anstream::println!("  {style}{word:<8}{style:#} {:<12} {}", r.name, printable(r.evidence.as_bytes()));
            if !r.remedy.is_empty() {
                anstream::println!("           fix: {}", r.remedy);
            }
        }
        anstream::println!("\n{HEAD}Changes{HEAD:#} {DIM}(none is made without --apply){DIM:#}");
        if changes.is_empty() {
            anstream::println!("  none: it is exported like this already");
        }
        for change in changes {
            anstream::println!("  {}", change.command_line());
            if let ServerChange::Write { text, .. } = change {
                text.lines().for_each(|line| anstream::println!("    {DIM}{line}{DIM:#}"));
            }
        }
    } else {
        let clients = plan.clients.join(", ");
        anstream::println!("{GOOD}{} is exported to {clients}{GOOD:#}", plan.mountpoint.display());
        for r in requirements.iter().filter(|r| r.state == RequirementState::Limited) {
            anstream::println!("{WARN}limited{WARN:#} {}: {}; {}", r.name, r.evidence, r.remedy);
        }
        if changes.iter().any(|change| change.command_line() == "systemctl start nfs-server") {
            anstream::println!(
                "the server was started for now: `systemctl enable nfs-server` starts it with the host, too, as a unit or an \
                 entry of /etc/fstab does with the mount"
            );
        }
    }
    anstream::println!("\n{HEAD}Clients type{HEAD:#}");
    for line in lines {
        anstream::println!("  {DIM}# {}{DIM:#}", line.title);
        anstream::println!("  {}", line.command);
        if !line.note.is_empty() {
            anstream::println!("  {DIM}# {}{DIM:#}", line.note);
        }
    }
}

/// Addresses that a host name stands for.
fn addresses_of(host: &str) -> Vec<IpAddr> {
    let named = (host, 0).to_socket_addrs().map(|found| found.map(|a| a.ip()).collect::<Vec<_>>());
    named.unwrap_or_default()
}

fn check_client(host: &str, as_json: bool) -> Result<ExitCode, Fault> {
    let root = Path::new("/");
    let all = NfsMount::read_all(root).map_err(|e| Fault::failed(format!("/proc/self/mountstats: {e}"), ""))?;
    let addresses = addresses_of(host);
    let (mounts, others): (Vec<NfsMount>, Vec<NfsMount>) = all.into_iter().partition(|m| m.is_of(host, &addresses));
    if mounts.is_empty() {
        let known: Vec<String> = others.iter().map(|m| format!("{} at {}", m.server, m.mountpoint)).collect();
        let remedy = if known.is_empty() {
            "this host has no NFS mounts; `spurline export MOUNTPOINT` on the server prints the commands".into()
        } else {
            format!("NFS mounts here are of: {}", known.join(", "))
        };
        return Err(Fault::failed(format!("nothing of {host} is mounted here by NFS"), remedy));
    }
    let server = ServerState::read();
    let served = NfsServerCounters::read(root);
    let called = NfsClientCounters::read(root);
    let mut failed = false;
    let mut rows = Vec::new();
    for mount in &mounts {
        let problems = problems_of(mount);
        let notes = notes_on(mount);
        failed |= !problems.is_empty();
        if as_json {
            let connections: Vec<Value> =
                mount.connections.iter().map(|c| json!({ "transport": c.transport, "requests": c.requests })).collect();
            rows.push(json!({
                "mountpoint": mount.mountpoint, "export": mount.export, "version": mount.version,
                "transport": mount.transport, "addresses": mount.addresses, "connections": connections,
                "read_bytes": mount.read_bytes, "written_bytes": mount.written_bytes, "problems": problems,
                "notes": notes,
            }));
            continue;
        }
        let carriers: Vec<String> =
            mount.connections.iter().map(|c| format!("{} ({} requests)", c.transport, c.requests)).collect();
        let addresses: Vec<String> = mount.addresses.iter().map(IpAddr::to_string).collect();
        anstream::println!(
            "{HEAD}{}{HEAD:#} {}:{} NFSv{} over {}",
            printable(mount.mountpoint.as_bytes()),
            mount.server,
            printable(mount.export.as_bytes()),
            mount.version,
            mount.transport
        );
        anstream::println!("  server       {}", addresses.join(", "));
        anstream::println!("  connections  {}: {}", mount.connections.len(), carriers.join(", "));
        anstream::println!("  read         {} bytes, written {} bytes", mount.read_bytes, mount.written_bytes);
        problems.iter().for_each(|problem| anstream::println!("  {WARN}{problem}{WARN:#}"));
        notes.iter().for_each(|note| anstream::println!("  {DIM}{note}{DIM:#}"));
    }
    let serves = server.threads > 0;
    if as_json {
        let server = serves.then(|| json!({ "state": server.to_json(), "counters": served.to_json() }));
        anstream::println!("{}", json!({ "host": host, "mounts": rows, "client": called.to_json(), "server": server }));
        return Ok(ExitCode::from(u8::from(failed)));
    }
    anstream::println!(
        "{HEAD}All NFS mounts of this host{HEAD:#}: {} calls, {} sent again",
        called.calls,
        called.sent_again
    );
    if serves {
        anstream::println!(
            "{HEAD}The NFS server of this host{HEAD:#}: {} threads at {}; {} calls, {} refused; {} bytes read, {} written",
            server.threads,
            server.ports.join(", "),
            served.calls,
            served.refused,
            served.read_bytes,
            served.write_bytes
        );
    }
    Ok(ExitCode::from(u8::from(failed)))
}

/// The differences from the requested mount.
fn problems_of(mount: &NfsMount) -> Vec<String> {
    let other = mount.connections.iter().find(|c| !mount.transport.starts_with(c.transport.as_str()));
    other
        .map(|other| format!("{} was asked for, and {} carries data", mount.transport, other.transport))
        .into_iter()
        .collect()
}

/// Why there is a single connection. The kernel keeps no record of the number that was asked for.
fn notes_on(mount: &NfsMount) -> Vec<String> {
    let note = match (mount.connections.len(), mount.ignores_nconnect()) {
        (1, true) => {
            "the kernel makes one connection for each address for NFSv4 over RDMA: nconnect has no effect; mount through \
             the address of each rail with max_connect"
        }
        (1, false) => {
            "one connection: without nconnect, or another mount of this server was made first, and its connections are shared"
        }
        _ => return Vec::new(),
    };
    vec![note.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_networks_addresses_and_names() {
        let good = [
            "10.0.0.0/24",
            "10.0.0.0/255.255.255.0",
            "fd00::/64",
            "fd00::1",
            "10.0.0.3",
            "host-1.example",
            "@group",
            "*",
            "node[1-4]*",
        ];
        for text in good {
            assert_eq!(parse_client(text).as_deref(), Ok(text));
        }
        let bad = [
            "",
            "10.0.0.300",
            "10.0.0",
            "10.0.0.0/33",
            "10.0.0.0/255.0.255.0",
            "fd00::/129",
            "fd00::/255.0.0.0",
            "fd00::x",
            "a(rw)",
            "x;y",
            "10.0.0.0/24 ",
        ];
        for text in bad {
            assert!(parse_client(text).is_err(), "{text}");
        }
    }
}
