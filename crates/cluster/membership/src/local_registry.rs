//! A coordinator's lease table as a registry for the same process, without a connection.

use crate::{LeaseTable, MemberWatch, NodeLease, Registry};
use parking_lot::Mutex;
use spurline_types::{Member, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the table is read.
const TABLE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The nodes of a group.
pub(crate) struct LocalRegistry {
    describe: String,
    group: String,
    roll: Arc<Mutex<LeaseTable>>,
}

impl LocalRegistry {
    pub(crate) fn new(describe: String, group: &str, roll: Arc<Mutex<LeaseTable>>) -> Self {
        LocalRegistry { describe, group: group.to_owned(), roll }
    }
}

impl Registry for LocalRegistry {
    fn description(&self) -> &str {
        &self.describe
    }

    fn watch_members(&self) -> Box<dyn MemberWatch> {
        let group = self.group.clone();
        let roll = Arc::clone(&self.roll);
        Box::new(LeaseTableWatch { group, roll, since: 0, known: BTreeMap::new() })
    }

    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        None
    }
}

struct LeaseTableWatch {
    group: String,
    roll: Arc<Mutex<LeaseTable>>,
    since: u64,
    known: BTreeMap<String, Arc<Member>>,
}

impl MemberWatch for LeaseTableWatch {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        loop {
            let changes = self.roll.lock().changes_since(&self.group, self.since);
            self.since = changes.revision;
            if changes.reset {
                self.known.clear();
            }
            let changed = !changes.put.is_empty() || !changes.gone.is_empty();
            self.known.extend(changes.put.into_iter().map(|member| (member.name.clone(), Arc::new(member))));
            for name in changes.gone {
                self.known.remove(&name);
            }
            if changed {
                return Ok(Some(self.known.values().cloned().collect()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(TABLE_POLL_INTERVAL.min(left));
        }
    }
}
