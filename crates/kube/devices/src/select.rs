//! Which HCAs an entry of the configuration selects, and which selector excludes the others. Values of a selector are
//! alternatives, selectors are combined; texts are compared exactly, as the reference does.

use crate::config::{DeviceSelectors, SelectorKey};
use crate::hca::{Hca, NodeHcas};

/// The first selector that excludes an HCA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectorMiss {
    /// The selector.
    pub key: SelectorKey,
    /// The HCA's values for the selector.
    pub has: Vec<String>,
}

/// The HCAs that the selectors match, in the node's order. Empty selectors match none.
pub fn select_hcas<'a>(node: &'a NodeHcas, selectors: &DeviceSelectors) -> Vec<&'a Hca> {
    if selectors.is_empty() {
        return Vec::new();
    }
    node.hcas.iter().filter(|hca| first_miss(hca, selectors).is_none()).collect()
}

/// The first selector that excludes `hca`; `None` for a selected HCA.
pub fn first_miss(hca: &Hca, selectors: &DeviceSelectors) -> Option<SelectorMiss> {
    SelectorKey::ALL.into_iter().find_map(|key| {
        let wanted = selectors.values(key);
        let has = values_of(hca, key);
        let hit = wanted.is_empty() || wanted.iter().any(|value| has.contains(value));
        (!hit).then_some(SelectorMiss { key, has })
    })
}

/// An HCA's values for a selector.
pub fn values_of(hca: &Hca, key: SelectorKey) -> Vec<String> {
    match key {
        SelectorKey::Vendors => own_value(&hca.vendor),
        SelectorKey::DeviceIds => own_value(&hca.device_id),
        SelectorKey::Drivers => own_value(&hca.driver),
        SelectorKey::IfNames => hca.interfaces.clone(),
        SelectorKey::LinkTypes => hca.link_types().iter().map(|t| (*t).to_owned()).collect(),
    }
}

fn own_value(value: &Option<String>) -> Vec<String> {
    value.iter().cloned().collect()
}
