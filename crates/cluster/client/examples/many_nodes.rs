//! Measures what following a large group costs: a coordinator (or the given registry) with many nodes that renew
//! their leases, and, in a separate process, one follower with the member list and placement of a mount. Prints the
//! follower's memory and CPU time.
//!
//! `cargo run --release -p spurline-client --example many_nodes -- [NODES] [REGISTRY-URL]`

use spurline_client::placement::{ReaderLocation, WantedBlock};
use spurline_client::{GroupMembers, GroupPeer};
use spurline_membership::{
    CoordinatorServer, CoordinatorServerConfig, HoldTimes, LEASE_TIME, NodeLease, Registry, RegistryFollower,
};
use spurline_trust::Trust;
use spurline_types::{Member, ObjectId, Stats};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Measuring time of the follower, idle and during changes.
const LOOK: Duration = Duration::from_secs(20);
/// Nodes that change their weight per second, in the second half.
const CHANGES: usize = 10;

fn open(url: &str) -> Arc<dyn Registry> {
    spurline_membership::open_registry(&url.parse().expect("a registry"), "many", &Trust::without_checks())
        .expect("a registry that can be opened")
}

fn node(index: usize) -> Member {
    Member {
        name: format!("gpu-node-{index:05}.cluster.example:7000"),
        instance: index as u64 + 1,
        addresses: vec![format!("10.{}.{}.{}:7000", index >> 16, index >> 8 & 255, index & 255)],
        weight: 100,
        zone: format!("rack-{}", index / 32),
    }
}

/// Resident memory in bytes and CPU time of this process, from the kernel.
fn usage() -> (u64, Duration) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    // User and system time are the 14th and 15th words, in hundredths of a second.
    let ticks: u64 = after.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
    (kib << 10, Duration::from_millis(ticks * 10))
}

fn follower(url: &str, nodes: usize) -> ExitCode {
    let (before, _) = usage();
    let begun = Instant::now();
    let stats = Arc::new(Stats::default());
    let follower = RegistryFollower::start(&open(url), HoldTimes::default(), Arc::clone(&stats)).expect("a thread");
    // No request is made, so no peer is created.
    let members = GroupMembers::new(&[], |_: &Member| -> Arc<GroupPeer> { unreachable!("no request is made") });
    let told = Arc::clone(&members);
    follower.set_listener(Arc::new(move |members: &[Arc<Member>]| told.set_members(members)));
    while members.snapshot().members().len() < nodes {
        std::thread::sleep(Duration::from_millis(100));
        assert!(begun.elapsed() < Duration::from_secs(300), "only {} nodes", members.snapshot().members().len());
    }
    let (memory, cpu) = usage();
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "{nodes} nodes seen after {:.1} s and {:.2} s of processor time; {:.1} MiB resident, {:.1} MiB before",
        begun.elapsed().as_secs_f64(),
        cpu.as_secs_f64(),
        mib(memory),
        mib(before)
    );
    for what in ["at rest".to_owned(), format!("while {CHANGES} nodes a second change")] {
        let ((_, cpu), changes) = (usage(), stats.group.changes.get());
        let from = Instant::now();
        std::thread::sleep(LOOK);
        let (memory, after) = usage();
        let share = (after - cpu).as_secs_f64() / from.elapsed().as_secs_f64() * 100.0;
        let changes = stats.group.changes.get() - changes;
        println!("{what}: {share:.2} % of a processor, {:.1} MiB resident, {changes} views", mib(memory));
    }
    let mut found = Vec::new();
    members.snapshot().rank_holders(
        WantedBlock::of_block(ObjectId(7), 0, 1),
        &ReaderLocation::default(),
        8,
        &mut found,
    );
    assert_eq!(found.len(), 8, "the list is the placement's");
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, url, nodes] = words.as_slice()
        && word == "follow"
    {
        return follower(url, nodes.parse().expect("a number"));
    }
    let nodes: usize = words.first().map_or(10_000, |word| word.parse().expect("a number of nodes"));
    let coordinator = words.get(1).is_none().then(|| {
        // Long, because all nodes share one busy process: late renewals do not matter here.
        let config = CoordinatorServerConfig { lease: 4 * LEASE_TIME, ..CoordinatorServerConfig::default() };
        CoordinatorServer::start(config, Arc::new(Stats::default())).expect("a coordinator")
    });
    let url = match (&coordinator, words.get(1)) {
        (Some(coordinator), _) => format!("coordinator://{}", coordinator.addresses()[0]),
        (None, Some(url)) => url.clone(),
        (None, None) => return ExitCode::FAILURE,
    };
    let registry = open(&url);
    let mut leases: Vec<(Member, Box<dyn NodeLease>)> =
        (0..nodes).map(|index| (node(index), registry.node_lease().expect("a lease"))).collect();
    let begun = Instant::now();
    let soon = || Instant::now() + Duration::from_secs(30);
    for (member, lease) in &mut leases {
        lease.renew(member, soon()).expect("an entry");
    }
    println!("{nodes} nodes entered {url} in {:.1} s", begun.elapsed().as_secs_f64());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut at, begun) = (0, Instant::now());
            while !done.load(Ordering::Relaxed) {
                let round = Instant::now();
                // Renews all leases in ten seconds; in the second half some nodes change their weight.
                for _ in 0..nodes.div_ceil(100) {
                    let (member, lease) = &mut leases[at % nodes];
                    let _ = lease.renew(member, soon());
                    at += 1;
                }
                if begun.elapsed() > LOOK + LOOK / 4 {
                    let (member, lease) = &mut leases[at % nodes];
                    member.weight = 300 - member.weight;
                    let _ = lease.renew(member, soon());
                }
                std::thread::sleep(Duration::from_millis(1000 / CHANGES as u64).saturating_sub(round.elapsed()));
            }
        });
        let own = std::env::current_exe().expect("this program");
        let status = Command::new(own).args(["follow", &url, &nodes.to_string()]).status();
        done.store(true, Ordering::Relaxed);
        if status.is_ok_and(|status| status.success()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    })
}
