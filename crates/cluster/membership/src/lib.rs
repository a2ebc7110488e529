//! Membership of a cache group: registries that list nodes, a node's registration, and a member list that outlives the registry.
//! Knows neither the nodes' contents nor the paths for data.
#![forbid(unsafe_code)]

mod announcer;
mod coordinator_client;
mod coordinator_server;
mod dns;
mod etcd;
mod etcd_jobs;
mod etcd_record;
mod etcd_session;
mod follower;
mod group_record;
mod handshake_gate;
mod job_service;
mod lease_table;
mod local_registry;
mod members;
mod node_record;
mod state_file;
mod static_list;
pub mod url;

pub use announcer::NodeAnnouncer;
pub use coordinator_server::{CoordinatorServer, CoordinatorServerConfig};
pub use etcd_jobs::{ActiveJob, BeginResult, JobStore, StoredJob};
pub use follower::{GroupStatus, MemberListener, RegistryFollower, RegistryState};
pub use group_record::{GroupRecord, RecordName, StoredRecord};
pub use job_service::{JobHandler, request_jobs};
pub use lease_table::{LeaseTable, TableLimits};
pub use members::{HoldTimes, MemberView};

use spurline_trust::Trust;
use spurline_types::{Member, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use url::RegistryUrl as Url;

/// Messages of the control plane, generated from `proto/spurline/group.proto`.
mod pb {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
    tonic::include_proto!("spurline.group.v1");
}

/// The part of etcd's API in use, generated from `proto/etcd/rpc.proto`.
mod etcdpb {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
    tonic::include_proto!("etcdserverpb");
}

/// A source of a group's node list. Opening has no effect yet; every call has a deadline.
pub trait Registry: Send + Sync + 'static {
    /// The registry's URL, without secrets.
    fn description(&self) -> &str;

    /// Starts watching the members.
    fn watch_members(&self) -> Box<dyn MemberWatch>;

    /// A registration for a node; `None` where the registry takes none.
    fn node_lease(&self) -> Option<Box<dyn NodeLease>>;

    /// A record of the group; `None` where the registry stores nothing.
    fn group_record(&self, name: RecordName) -> Option<Box<dyn GroupRecord>> {
        let _ = name;
        None
    }
}

/// A running watch of a group's members.
pub trait MemberWatch: Send {
    /// Waits until `until` for a change and returns all members; an unchanged member is the same `Arc`. Connecting
    /// may take some seconds more. `None` when the registry answers and nothing changed. After an error the next call
    /// tries again.
    ///
    /// # Errors
    /// When the registry can't be reached or stopped answering, with what was tried.
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>>;
}

/// A node's registration.
pub trait NodeLease: Send {
    /// Registers `member` or renews the registration; returns how long that holds.
    ///
    /// # Errors
    /// `Invalid` when another process holds the name, with both addresses; otherwise when the registry can't be
    /// reached.
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration>;

    /// Removes the registration. A failure is no error: the lease runs out.
    fn release(&mut self, until: Instant);
}

/// How long a registration lasts without a renewal; nodes renew three times as often.
pub const LEASE_TIME: Duration = Duration::from_secs(15);

/// Upper limit for connecting to a registry, and for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens the registry behind a URL for a group. With a coordinator, each side proves what `trust` holds; etcd has other users and
/// certificates.
///
/// # Errors
/// When the URL is invalid, or a file named there can't be read.
pub fn open_registry(url: &Url, group: &str, trust: &Arc<Trust>) -> Result<Arc<dyn Registry>> {
    Ok(match url {
        Url::Static(nodes) => Arc::new(static_list::StaticRegistry::new(nodes)),
        Url::Dns(name) => Arc::new(dns::DnsRegistry::new(name)?),
        Url::Etcd(url) => Arc::new(etcd::EtcdRegistry::new(url, group)?),
        Url::Coordinator(at) => Arc::new(coordinator_client::CoordinatorClient::new(at, group, trust)?),
    })
}

/// Whether a process may take over another's name: with the same first address, where only a single process can listen, or as the
/// same process.
fn may_take_over(old: &Member, new: &Member) -> bool {
    old.instance == new.instance || (!new.addresses.is_empty() && old.addresses.first() == new.addresses.first())
}

/// The message for a name that two processes use.
fn name_conflict(group: &str, held: &Member, refused: &Member) -> String {
    format!(
        "group {group} has a node '{}' already, at {}; the one at {} is another process and was refused: give one of \
         them another --name",
        held.name,
        held.addresses.join(","),
        refused.addresses.join(","),
    )
}

/// A runtime with a single thread for registries over gRPC or DNS; callers block on other threads.
fn small_runtime(name: &str) -> Result<tokio::runtime::Runtime> {
    runtime_with(name, 1)
}

/// A runtime with this many threads.
fn runtime_with(name: &str, threads: usize) -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .build()
        .map_err(|e| spurline_types::Error::io("a runtime for the registry", &e))
}
