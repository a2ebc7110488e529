//! `static:`: the nodes are the ones listed. It is told nothing and never changes.

use crate::{Lease, Registry, Watch};
use spurline_types::HostPort;
use spurline_types::{Member, Result};
use std::sync::Arc;
use std::time::Instant;

/// A list of nodes.
pub(crate) struct Fixed {
    url: String,
    members: Vec<Arc<Member>>,
}

impl Fixed {
    pub(crate) fn new(nodes: &[HostPort]) -> Self {
        let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let mut members: Vec<Arc<Member>> = Vec::new();
        for name in &names {
            if !members.iter().any(|known| known.name == *name) {
                members.push(Arc::new(Member::at(name, 100)));
            }
        }
        Fixed { url: format!("static:{}", names.join(",")), members }
    }
}

impl Registry for Fixed {
    fn describe(&self) -> &str {
        &self.url
    }
    fn watch(&self) -> Box<dyn Watch> {
        Box::new(Once(Some(self.members.clone())))
    }
    fn lease(&self) -> Option<Box<dyn Lease>> {
        None
    }
}

struct Once(Option<Vec<Arc<Member>>>);

impl Watch for Once {
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let members = self.0.take();
        if members.is_none() {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        Ok(members)
    }
}
