//! Folder rules of a group: the rule set with revision and text form, and the record in the registry. Knows neither blocks nor
//! nodes.
#![forbid(unsafe_code)]

mod node_rules;
mod set;
mod store;

pub use node_rules::{HeldRule, NodeRules};
pub use set::{RULES_MAX, RuleSet};
pub use spurline_cache::{FolderRule, WriteClass};
pub use store::RuleStore;
