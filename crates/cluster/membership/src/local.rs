//! A coordinator's list as a registry for its own process, with no connection in between.

use crate::{Lease, Registry, Roll, Watch};
use parking_lot::Mutex;
use spurline_types::{Member, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the list is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// The list of one group.
pub(crate) struct Local {
    describe: String,
    group: String,
    roll: Arc<Mutex<Roll>>,
}

impl Local {
    pub(crate) fn new(describe: String, group: &str, roll: Arc<Mutex<Roll>>) -> Self {
        Local { describe, group: group.to_owned(), roll }
    }
}

impl Registry for Local {
    fn describe(&self) -> &str {
        &self.describe
    }

    fn watch(&self) -> Box<dyn Watch> {
        let (group, roll) = (self.group.clone(), Arc::clone(&self.roll));
        Box::new(Following { group, roll, since: 0, known: BTreeMap::new() })
    }

    fn lease(&self) -> Option<Box<dyn Lease>> {
        None
    }
}

struct Following {
    group: String,
    roll: Arc<Mutex<Roll>>,
    since: u64,
    known: BTreeMap<String, Arc<Member>>,
}

impl Watch for Following {
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        loop {
            let changes = self.roll.lock().changes(&self.group, self.since);
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
            std::thread::sleep(LOOK.min(left));
        }
    }
}
