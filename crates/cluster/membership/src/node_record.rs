//! A node as JSON, in the coordinator's file and in etcd. Reads what older and newer versions wrote.

use serde::{Deserialize, Serialize};
use spurline_types::Member;
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
struct NodeRecord {
    name: String,
    #[serde(default)]
    instance: u64,
    addresses: Vec<String>,
    weight: u32,
    #[serde(default)]
    zone: String,
}

impl From<&Member> for NodeRecord {
    fn from(member: &Member) -> Self {
        let Member { name, instance, addresses, weight, zone } = member.clone();
        NodeRecord { name, instance, addresses, weight, zone }
    }
}

impl From<NodeRecord> for Member {
    fn from(record: NodeRecord) -> Self {
        let NodeRecord { name, instance, addresses, weight, zone } = record;
        Member { name, instance, addresses, weight, zone }
    }
}

#[derive(Serialize, Deserialize)]
struct GroupsFile {
    groups: BTreeMap<String, Vec<NodeRecord>>,
}

/// All groups as the text of a state file.
pub(crate) fn format_groups(groups: &BTreeMap<String, Vec<Member>>) -> String {
    let file =
        GroupsFile { groups: groups.iter().map(|(name, members)| (name.clone(), records_of(members))).collect() };
    // Strings and numbers only: serialising can't fail.
    serde_json::to_string_pretty(&file).unwrap_or_default()
}

fn records_of(members: &[Member]) -> Vec<NodeRecord> {
    members.iter().map(NodeRecord::from).collect()
}

/// Parses a state file.
///
/// # Errors
/// Why the text is invalid.
pub(crate) fn parse_groups(text: &[u8]) -> Result<BTreeMap<String, Vec<Member>>, String> {
    let file: GroupsFile = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    Ok(file.groups.into_iter().map(|(name, records)| (name, members_from(records))).collect())
}

fn members_from(records: Vec<NodeRecord>) -> Vec<Member> {
    records.into_iter().map(Member::from).collect()
}

/// A node as text.
pub(crate) fn format_member(member: &Member) -> String {
    serde_json::to_string(&NodeRecord::from(member)).unwrap_or_default()
}

/// Parses a node.
///
/// # Errors
/// Why the text is invalid.
pub(crate) fn parse_member(text: &[u8]) -> Result<Member, String> {
    serde_json::from_slice::<NodeRecord>(text).map(Member::from).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn what_is_written_is_read(name in ".{1,20}", zone in ".{0,9}", instance: u64, weight: u32) {
            let member = Member { name, zone, instance, ..Member::from_address("[::1]:7000", weight) };
            let groups = BTreeMap::from([("g".to_owned(), vec![member])]);
            proptest::prop_assert_eq!(parse_groups(format_groups(&groups).as_bytes()).unwrap(), groups);
        }

        #[test]
        fn nothing_panics(text in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = parse_groups(&text);
        }
    }

    #[test]
    fn newer_and_older_files_are_read() {
        let text = r#"{"groups":{"g":[{"name":"n","addresses":["a:1"],"weight":1,"later":true}]},"later":1}"#;
        assert_eq!(parse_groups(text.as_bytes()).unwrap()["g"][0].zone, "");
        assert!(parse_groups(b"{").is_err());
    }
}
