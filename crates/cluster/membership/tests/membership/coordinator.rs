//! A real coordinator on loopback: nodes enter and leave, it is killed, it restarts empty and with its file.

use crate::common;
use common::{node, of_group, open, wait_for};
use spurline_membership::{
    CoordinatorServer, CoordinatorServerConfig, HoldTimes, NodeAnnouncer, RecordName, RegistryFollower, RegistryState,
    StoredRecord,
};
use spurline_types::{ErrorKind, Stats};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LEASE: Duration = Duration::from_secs(3);

/// Starts one; where it was before when `at` is given, as soon as the port is free again.
fn start(at: Option<SocketAddr>, file: Option<&Path>) -> CoordinatorServer {
    let listen = vec![at.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)))];
    let config = CoordinatorServerConfig { listen, file: file.map(Path::to_owned), lease: LEASE, ..Default::default() };
    let mut started = None;
    wait_for("the port", || {
        started = CoordinatorServer::start(config.clone(), Arc::new(Stats::default())).ok();
        started.is_some()
    });
    started.unwrap()
}

fn url(coordinator: &CoordinatorServer) -> String {
    format!("coordinator://{}", coordinator.addresses()[0])
}

fn names(follower: &RegistryFollower, there: bool) -> Vec<String> {
    let seen = follower.group_status().members;
    seen.into_iter().filter(|placed| placed.present == there).map(|placed| placed.member.name.clone()).collect()
}

#[test]
fn nodes_enter_and_leave_and_a_name_is_one_process() {
    let coordinator = start(None, None);
    let registry = open(&url(&coordinator));
    let stats = Arc::new(Stats::default());
    let follower = RegistryFollower::start(&registry, HoldTimes::default(), Arc::clone(&stats)).unwrap();
    let soon = Instant::now() + Duration::from_millis(100);
    assert!(follower.first_members(soon).unwrap_err().message().contains(&url(&coordinator)[14..]));
    let a = NodeAnnouncer::start(&registry, node("a", 1), Arc::clone(&stats)).unwrap().unwrap();
    let _b = NodeAnnouncer::start(&registry, node("b", 2), Arc::clone(&stats)).unwrap().unwrap();
    assert!(!follower.first_members(Instant::now() + Duration::from_secs(60)).unwrap().is_empty());
    wait_for("both", || names(&follower, true) == ["a", "b"]);
    // Another process with the name of a living one; on a very slow machine the living one may miss a lease.
    let mut thief = node("a", 3);
    thief.instance = 77;
    let mut lease = registry.node_lease().unwrap();
    let mut refused = None;
    wait_for("the refusal", || {
        refused = lease.renew(&thief, Instant::now() + Duration::from_secs(60)).err();
        refused.is_some()
    });
    let refused = refused.unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.message().contains("127.0.0.1:1") && refused.message().contains("127.0.0.1:3"), "{refused}");
    // A node's change is seen; a node that leaves keeps its place.
    a.update_member_by(Instant::now() + Duration::from_secs(60), |member| member.weight = 0).unwrap();
    assert_eq!(coordinator.list_groups()["g"][0].weight, 0, "the change is registered before the call returns");
    wait_for("the weight", || follower.group_status().members[0].member.weight == 0);
    drop(a);
    wait_for("the leaving", || names(&follower, false) == ["a"]);
    wait_for("the other", || names(&follower, true) == ["b"]);
    wait_for("the list", || coordinator.list_groups()["g"].len() == 1);
    // Another group is another world.
    let other = of_group(&url(&coordinator), "other");
    let empty = RegistryFollower::start(&other, HoldTimes::default(), stats).unwrap();
    assert!(empty.first_members(Instant::now() + Duration::from_millis(300)).is_err());
}

#[test]
fn a_coordinator_that_is_gone_or_forgets_empties_no_view() {
    let coordinator = start(None, None);
    let at = coordinator.addresses()[0];
    let registry = open(&url(&coordinator));
    let stats = Arc::new(Stats::default());
    let follower = RegistryFollower::start(&registry, HoldTimes::default(), Arc::clone(&stats)).unwrap();
    let enter =
        |name: &str, port| NodeAnnouncer::start(&registry, node(name, port), Arc::clone(&stats)).unwrap().unwrap();
    let (a, b) = (enter("a", 1), enter("b", 2));
    wait_for("both", || names(&follower, true) == ["a", "b"]);
    drop(coordinator);
    wait_for("the loss", || matches!(follower.group_status().state, RegistryState::Lost { .. }));
    wait_for("the nodes to notice", || a.registration_failure().is_some() && b.registration_failure().is_some());
    assert_eq!(follower.group_status().members.len(), 2, "the members last known stay");
    // Empty, and only one of the nodes is left: the other keeps its place all the same.
    drop(b);
    let again = start(Some(at), None);
    wait_for("the registry", || matches!(follower.group_status().state, RegistryState::Up));
    wait_for("the other node", || names(&follower, true) == ["a"] && names(&follower, false) == ["b"]);
    wait_for("peace of mind", || a.registration_failure().is_none());
    assert!(stats.group.registry_losses.get() > 0);
    drop((a, again));
}

#[test]
fn a_node_that_was_in_the_group_serves_on_though_it_can_not_say_so() {
    let coordinator = start(None, None);
    let (at, registry) = (coordinator.addresses()[0], open(&url(&coordinator)));
    drop(coordinator);
    let stats = Arc::new(Stats::default());
    let a = NodeAnnouncer::rejoin(&registry, node("a", 1), Arc::clone(&stats)).unwrap().unwrap();
    assert!(a.registration_failure().is_some());
    wait_for("the gauge", || stats.group.unlisted_seconds.get() > 0);
    assert_eq!(stats.group.registry_lost_seconds.get(), 0, "that counter belongs to followers");
    // A change that can't be sent in time is taken back.
    let said = a.update_member_by(Instant::now() + Duration::from_millis(50), |member| member.weight = 0).unwrap_err();
    assert!(said.message().contains("did not take the change"), "{said}");
    let again = start(Some(at), None);
    wait_for("the node", || again.list_groups().get("g").is_some_and(|nodes| nodes.len() == 1));
    wait_for("peace of mind", || a.registration_failure().is_none() && stats.group.unlisted_seconds.get() == 0);
    assert_eq!(again.list_groups()["g"][0].weight, 100);
}

#[test]
fn a_file_is_one_coordinator_s_and_what_is_in_the_way_is_named_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let first = start(None, Some(&file));
    let fails = |listen: SocketAddr, file: Option<&Path>| {
        let (listen, file) = (vec![listen], file.map(Path::to_owned));
        let config = CoordinatorServerConfig { listen, file, ..Default::default() };
        CoordinatorServer::start(config, Arc::new(Stats::default())).err().unwrap().to_string()
    };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let said = fails(any, Some(&file));
    assert!(said.contains("another coordinator") && said.contains("--state-file none"), "{said}");
    let said = fails(any, Some(&file.join("below")));
    assert!(said.contains("can't be kept") && said.contains("--state-file none"), "{said}");
    let said = fails(first.addresses()[0], None);
    assert!(said.contains("ss -ltnp") && said.contains("--group-port"), "{said}");
    drop(first);
    start(None, Some(&file));
}

#[test]
fn a_restart_knows_the_nodes_of_before() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("new/state.json");
    let coordinator = start(None, Some(&file));
    let registry = open(&url(&coordinator));
    let mut lease = registry.node_lease().unwrap();
    lease.renew(&node("a", 1), Instant::now() + Duration::from_secs(60)).unwrap();
    let at = coordinator.addresses()[0];
    drop(coordinator);
    // Were the lease over already, the file would say so.
    let kept = std::fs::read_to_string(&file).unwrap().contains("127.0.0.1:1");
    let again = start(Some(at), Some(&file));
    if kept {
        assert!(again.list_groups()["g"].iter().all(|member| *member == node("a", 1)));
    }
    // The node has not come back: its lease ends at last.
    wait_for("the end of the lease", || again.list_groups().get("g").is_none_or(Vec::is_empty));
    drop(again);
    // A damaged file is reported and set aside.
    std::fs::write(&file, b"{").unwrap();
    assert!(start(Some(at), Some(&file)).list_groups().is_empty());
}

#[test]
fn an_unreachable_one_is_named() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let registry = open(&format!("coordinator://{gone}"));
    let mut lease = registry.node_lease().unwrap();
    let error = lease.renew(&node("a", 1), Instant::now() + Duration::from_secs(60)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains(&gone.to_string()), "{error}");
    assert!(registry.watch_members().next_members(Instant::now()).unwrap_err().message().contains(&gone.to_string()));
}

#[test]
fn a_record_has_one_writer_at_a_time_and_outlives_a_restart_with_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("nodes");
    let text = |revision: u64| serde_json::json!({"revision": revision});
    let one = start(None, Some(&file));
    let at = one.addresses()[0];
    let (record, other) = (
        open(&url(&one)).group_record(RecordName::Rules).unwrap(),
        open(&url(&one)).group_record(RecordName::Rules).unwrap(),
    );
    let read = |known: Option<u64>| {
        let mut found = None;
        wait_for("an answer", || {
            found = record.read(known).ok();
            found.is_some()
        });
        found.unwrap()
    };
    assert_eq!(read(None), Some(StoredRecord { version: 0, value: serde_json::Value::Null }));
    assert!(other.replace(0, &text(1)).unwrap());
    assert!(!record.replace(0, &text(9)).unwrap(), "the other writer was first");
    let first = read(None).unwrap();
    assert_eq!((&first.value, read(Some(first.version))), (&text(1), None));
    // Another record of the group, by two handles.
    let stages = [(); 2].map(|()| open(&url(&one)).group_record(RecordName::Stage).unwrap());
    assert!(stages[0].replace(0, &text(7)).unwrap());
    let stage = stages[1].read(None).unwrap().unwrap();
    assert_eq!((&stage.value, stages[0].read(Some(stage.version)).unwrap()), (&text(7), None));
    assert!(!stages[1].replace(0, &text(8)).unwrap());
    assert!(stages[1].replace(stage.version, &text(9)).unwrap());
    let stage = stages[0].read(Some(stage.version)).unwrap();
    assert_eq!(stage.as_ref().map(|stage| &stage.value), Some(&text(9)));
    assert_eq!(read(Some(first.version)), None, "the rules did not change");
    assert!(record.replace(first.version, &text(2)).unwrap());
    let second = other.read(None).unwrap().unwrap();
    drop(one);
    let one = start(Some(at), Some(&file));
    assert_eq!(read(None), Some(second.clone()));
    wait_for("the other record", || stages[0].read(None).is_ok_and(|read| read == stage));
    drop(one);
    let one = start(Some(at), None);
    assert_eq!(read(None).unwrap().version, 0, "nothing is kept without a file");
    drop(one);
    let mut error = None;
    wait_for("the end", || {
        error = record.read(None).err();
        error.is_some()
    });
    let error = error.unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains(&at.to_string()), "{error}");
    // Registries of other kinds list nodes and store nothing.
    for name in [RecordName::Rules, RecordName::Stage] {
        for url in ["static:127.0.0.1:1", "dns:nodes.example:1"] {
            assert!(open(url).group_record(name).is_none());
        }
    }
}

#[test]
fn a_file_of_before_that_can_not_be_read_stops_the_start_and_stays() {
    for name in ["nodes", "nodes.rules"] {
        let dir = tempfile::tempdir().unwrap();
        // A directory can't be read as a file, not even by root.
        std::fs::create_dir(dir.path().join(name)).unwrap();
        let config =
            CoordinatorServerConfig { file: Some(dir.path().join("nodes")), lease: LEASE, ..Default::default() };
        let error = CoordinatorServer::start(config, Arc::new(Stats::default())).err().unwrap();
        let said = error.message();
        assert!(said.contains(&format!("{name} can't be read")) && said.contains("--state-file"), "{error}");
        assert!(dir.path().join(name).is_dir());
    }
}
