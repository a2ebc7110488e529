//! The jobs that a coordinator does for its groups: each group has a board of its own, kept beside the coordinator's
//! list of nodes, so that a restart goes on with them.

use super::target;
use crate::group;
use crate::peers::Reach;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::Value;
use spurline_client::placement::{Copies, Standpoint};
use spurline_client::{Patience, Remote, RemoteConfig, Roster};
use spurline_group::{Jobs, Registry};
use spurline_jobs::{Board, DirKeep, Target};
use spurline_mem::{Pool, Tier};
use spurline_net_tcp::SocketOptions;
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A node answers a request to fetch when all of it is there.
const PATIENCE: Duration = Duration::from_secs(60);
/// Connections to each node: as many requests are under way.
const CONNECTIONS: usize = 64;
/// A node that owes an answer and gives no sign of life for this long is given up.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a node that left keeps its place.
const HOLD: Duration = Duration::from_secs(60);
/// What a name of a group is in a file system.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// Opens the list of a group's nodes.
pub type Registries = dyn Fn(&str) -> Option<Arc<dyn Registry>> + Send + Sync;

/// How jobs reach the nodes of any group of this coordinator.
#[derive(Clone)]
struct Way {
    registry: Arc<Registries>,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
}

/// The jobs of all groups.
pub struct GroupJobs {
    dir: PathBuf,
    way: Way,
    boards: Mutex<BTreeMap<String, Arc<Board>>>,
}

impl GroupJobs {
    /// Goes on with the jobs kept in `dir`; nodes are found by what `registry` opens.
    ///
    /// # Errors
    /// When the directory can't be used.
    pub fn start(dir: &Path, registry: Arc<Registries>, trust: Arc<Trust>, stats: Arc<Stats>) -> Result<Arc<Self>> {
        let io = |e: std::io::Error| Error::io(format_args!("{}", dir.display()), &e);
        std::fs::create_dir_all(dir).map_err(io)?;
        let way = Way { registry, trust, stats };
        let jobs = Arc::new(GroupJobs { dir: dir.to_owned(), way, boards: Mutex::default() });
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            if let Some(name) = name.to_str().and_then(|name| percent_decode_str(name).decode_utf8().ok())
                && entry.path().is_dir()
            {
                jobs.board(&name)?;
            }
        }
        Ok(jobs)
    }

    fn board(&self, group: &str) -> Result<Arc<Board>> {
        let mut boards = self.boards.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(board) = boards.get(group) {
            return Ok(Arc::clone(board));
        }
        if group.is_empty() || group.len() > 255 {
            return Err(Error::new(ErrorKind::Invalid, "a group has a name of at most 255 bytes"));
        }
        let dir = self.dir.join(utf8_percent_encode(group, PLAIN).to_string());
        let (way, name) = (self.way.clone(), group.to_owned());
        let open = move |source: &str| way.target(&name, source);
        let board = Board::start(Arc::new(DirKeep::open(&dir)?), &dir.join("files"), Arc::new(open))?;
        boards.insert(group.to_owned(), Arc::clone(&board));
        Ok(board)
    }

    /// Ends the work; a later start goes on with it.
    pub fn suspend(&self) {
        let boards: Vec<_> = self.boards.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for board in boards {
            board.suspend();
        }
    }
}

impl Jobs for GroupJobs {
    fn ask(&self, group: &str, request: &Value) -> Result<Value> {
        self.board(group)?.answer(request)
    }
}

impl Way {
    fn target(&self, group: &str, source: &str) -> Result<Arc<dyn Target>> {
        let unreached = |fault: spurline_config::Fault| Error::new(ErrorKind::Unavailable, fault.what);
        let ends = || Error::new(ErrorKind::Unavailable, "the coordinator ends");
        let registry = (self.registry)(group).ok_or_else(ends)?;
        let (follower, members) = group::follow(&registry, group, HOLD, &self.stats).map_err(unreached)?;
        let reach = Reach {
            name: format!("{}:coordinator", group::hostname()),
            source: source.to_owned(),
            locals: Vec::new(),
            socket: SocketOptions::default(),
            trust: Arc::clone(&self.trust),
            nconnect: CONNECTIONS,
            stats: Arc::clone(&self.stats),
        };
        let roster = Roster::new(&members, move |member| reach.peer(member));
        group::keep_up(&follower, &roster);
        let config = RemoteConfig {
            patience: Patience::new(PATIENCE),
            fetchers: 2,
            metadata_age: Duration::from_secs(1),
            copies: Copies::default(),
            standpoint: Standpoint { zone: String::new(), seed: u64::from(std::process::id()) },
            silence: SILENCE,
            hedge_after: Duration::ZERO,
        };
        // No data comes here: this is what a volume has to have.
        let memory = |block: u64| Ok(Tier::new(Pool::new(2 * block, block as usize)?));
        let remote = Remote::connect(source, roster, config, Arc::clone(&self.stats), memory)?;
        Ok(Arc::new(target::Group::following(remote, follower)))
    }
}
