//! `static:`: a fixed list of nodes. Takes no registrations and never changes.

use crate::{MemberWatch, NodeLease, Registry};
use spurline_types::HostPort;
use spurline_types::{Member, Result};
use std::sync::Arc;
use std::time::Instant;

/// A list of nodes.
pub(crate) struct StaticRegistry {
    url: String,
    members: Vec<Arc<Member>>,
}

impl StaticRegistry {
    pub(crate) fn new(nodes: &[HostPort]) -> Self {
        let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let mut members: Vec<Arc<Member>> = Vec::new();
        for name in &names {
            if !members.iter().any(|known| known.name == *name) {
                members.push(Arc::new(Member::from_address(name, 100)));
            }
        }
        StaticRegistry { url: format!("static:{}", names.join(",")), members }
    }
}

impl Registry for StaticRegistry {
    fn description(&self) -> &str {
        &self.url
    }
    fn watch_members(&self) -> Box<dyn MemberWatch> {
        Box::new(StaticWatch(Some(self.members.clone())))
    }
    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        None
    }
}

struct StaticWatch(Option<Vec<Arc<Member>>>);

impl MemberWatch for StaticWatch {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let members = self.0.take();
        if members.is_none() {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        Ok(members)
    }
}
