//! A node's answer about folder rules: the rules that the node follows, and the room on the node's disks.

use crate::RuleSet;
use serde::{Deserialize, Serialize};
use spurline_cache::FolderRule;

/// A rule, and the bytes that a node holds under the rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRule {
    /// The rule.
    #[serde(flatten)]
    pub rule: FolderRule,
    /// Bytes on the node's disks.
    #[serde(default)]
    pub held_bytes: u64,
}

/// The rules, sources and room of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeRules {
    /// Revision of the rules.
    pub revision: u64,
    /// By URL.
    pub rules: Vec<HeldRule>,
    /// Sources that the node serves.
    pub sources: Vec<String>,
    /// Sources that mounts mount.
    pub volumes: Vec<String>,
    /// Size of a block.
    pub block_size: u64,
    /// Bytes that pins hold.
    pub pinned_bytes: u64,
    /// The most that pins may hold.
    pub most_pinned_bytes: u64,
    /// Size of the cache disks; none without a disk.
    pub capacity_bytes: Option<u64>,
}

impl NodeRules {
    /// The rules as a set.
    pub fn to_set(&self) -> RuleSet {
        let rules = self.rules.iter().map(|held| held.rule.clone()).collect();
        RuleSet { revision: self.revision, rules }
    }

    /// The bytes held under the rule of exactly this folder.
    pub fn held_bytes(&self, url: &str) -> u64 {
        self.rules.iter().find(|held| held.rule.url == url).map_or(0, |held| held.held_bytes)
    }

    /// The room for further pins.
    pub fn pin_room(&self) -> u64 {
        self.most_pinned_bytes.saturating_sub(self.pinned_bytes)
    }
}
