//! A node as JSON text: in the coordinator's file and in etcd. It reads what older and newer versions wrote.

use serde::{Deserialize, Serialize};
use spurline_types::Member;
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
struct Record {
    name: String,
    #[serde(default)]
    instance: u64,
    addresses: Vec<String>,
    weight: u32,
    #[serde(default)]
    zone: String,
}

impl From<&Member> for Record {
    fn from(member: &Member) -> Self {
        let Member { name, instance, addresses, weight, zone } = member.clone();
        Record { name, instance, addresses, weight, zone }
    }
}

impl From<Record> for Member {
    fn from(record: Record) -> Self {
        let Record { name, instance, addresses, weight, zone } = record;
        Member { name, instance, addresses, weight, zone }
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    groups: BTreeMap<String, Vec<Record>>,
}

/// All groups as the text of a file.
pub(crate) fn of_groups(groups: &BTreeMap<String, Vec<Member>>) -> String {
    let records = |members: &Vec<Member>| members.iter().map(Record::from).collect();
    let file = File { groups: groups.iter().map(|(name, members)| (name.clone(), records(members))).collect() };
    // Strings and numbers only: nothing in it can fail.
    serde_json::to_string_pretty(&file).unwrap_or_default()
}

/// The groups in the text of a file.
///
/// # Errors
/// Why it makes no sense.
pub(crate) fn groups_of(text: &[u8]) -> Result<BTreeMap<String, Vec<Member>>, String> {
    let file: File = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let members = |records: Vec<Record>| records.into_iter().map(Member::from).collect();
    Ok(file.groups.into_iter().map(|(name, records)| (name, members(records))).collect())
}

/// One node as text.
pub(crate) fn of_member(member: &Member) -> String {
    serde_json::to_string(&Record::from(member)).unwrap_or_default()
}

/// The node in a text.
///
/// # Errors
/// Why it makes no sense.
pub(crate) fn member_of(text: &[u8]) -> Result<Member, String> {
    serde_json::from_slice::<Record>(text).map(Member::from).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn what_is_written_is_read(name in ".{1,20}", zone in ".{0,9}", instance: u64, weight: u32) {
            let member = Member { name, zone, instance, ..Member::at("[::1]:7000", weight) };
            let groups = BTreeMap::from([("g".to_owned(), vec![member])]);
            proptest::prop_assert_eq!(groups_of(of_groups(&groups).as_bytes()).unwrap(), groups);
        }

        #[test]
        fn nothing_panics(text in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = groups_of(&text);
        }
    }

    #[test]
    fn newer_and_older_files_are_read() {
        let text = r#"{"groups":{"g":[{"name":"n","addresses":["a:1"],"weight":1,"later":true}]},"later":1}"#;
        assert_eq!(groups_of(text.as_bytes()).unwrap()["g"][0].zone, "");
        assert!(groups_of(b"{").is_err());
    }
}
