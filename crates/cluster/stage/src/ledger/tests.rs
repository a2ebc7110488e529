//! Conditions of writers, queues of uploads, and pages of names.

use super::*;
use crate::manifest_samples::sample;

fn at(key: &str) -> BucketKey {
    BucketKey::new("s3://bucket", key)
}

fn with_entries(keys: &[&str]) -> Ledger {
    let mut ledger = Ledger::default();
    for (number, key) in keys.iter().enumerate() {
        ledger.enter(sample(key, &format!("mark-{number}"), number as u64), Instant::now(), false);
    }
    ledger
}

/// The removal of a name begins.
fn begin_removal(ledger: &mut Ledger, key: &str) {
    ledger.entries.get_mut(&at(key)).unwrap().manifest.phase = Phase::Removing;
    ledger.queue_at(Instant::now(), &at(key));
}

#[test]
fn a_removal_goes_on_at_the_store_after_the_answer() {
    let mut ledger = with_entries(&["a", "b"]);
    let soon = Instant::now() + Duration::from_secs(5);
    let upload = ledger.take_job(soon).ok().unwrap();
    begin_removal(&mut ledger, "a");
    // The upload ends first, and its object is removed then.
    assert_eq!(ledger.take_job(soon).ok().unwrap().at, at("b"));
    ledger.note_saved(&upload, "real", &BTreeSet::new(), Instant::now());
    let removal = ledger.take_job(soon).ok().unwrap();
    assert_eq!((&removal.at, removal.phase), (&at("a"), Phase::Removing));
    // A new object of the name may find the old one, or none.
    assert_eq!(admitted(&ledger, "a", &StoreBase::Absent, "new"), "Absent [\"mark-0\"] or absent");
    ledger.enter(sample("a", "new", 9), Instant::now(), false);
    ledger.note_removed(&removal, &BTreeSet::new(), Instant::now());
    assert!(matches!(ledger.find(&at("a")), KnownName::Object(found) if found.mark == "new"));
    assert!(ledger.ended.is_replaced(&at("a"), (0, 0)));
    // Without another one the name is free.
    begin_removal(&mut ledger, "a");
    let removal = ledger.take_job(soon).ok().unwrap();
    ledger.note_removed(&removal, &BTreeSet::new(), Instant::now());
    assert!(matches!(ledger.find(&at("a")), KnownName::Unknown));
}

#[test]
fn a_node_that_comes_back_brings_ends_and_earlier_objects() {
    let mut ledger = Ledger::default();
    ledger.enter(sample("a", "fifth", 5), Instant::now(), false);
    // An earlier object was uploaded, and another waits.
    ledger.note_done(&sample("a", "third", 3), &"node-0".to_owned());
    ledger.adopt(sample("a", "fourth", 4), "node-0", |_| true);
    let entry = &ledger.entries[&at("a")];
    assert_eq!(entry.manifest.begun, ["third", "fourth"]);
    assert_eq!(entry.replaced, [sample("a", "fourth", 4)]);
    ledger.end_replaced(&at("a"));
    let entry = ledger.entries.get_mut(&at("a")).unwrap();
    assert!(entry.is_wounded() && entry.replaced.len() == 1, "the nodes do not know of the earlier objects yet");
    entry.is_untold = false;
    ledger.end_replaced(&at("a"));
    assert!(ledger.entries[&at("a")].replaced.is_empty());
    // A later object is done: the object of the name is, too.
    ledger.note_done(&sample("a", "sixth", 6), &"node-1".to_owned());
    assert!(ledger.entries.is_empty() && ledger.ended.is_replaced(&at("a"), (1, 5)));
    ledger.adopt(sample("a", "seventh", 7), "node-1", |_| true);
    let entry = &ledger.entries[&at("a")];
    let begun: BTreeSet<&str> = entry.manifest.begun.iter().map(String::as_str).collect();
    assert!(["third", "fifth", "sixth"].iter().all(|mark| begun.contains(mark)), "{begun:?}");
    assert!(entry.is_untold);
}

#[test]
fn a_new_object_waits_for_a_removal_that_takes_any() {
    let mut ledger = Ledger::default();
    ledger.enter(Manifest { base: StoreBase::Any, ..sample("a", "any", 1) }, Instant::now(), false);
    begin_removal(&mut ledger, "a");
    assert_eq!(admitted(&ledger, "a", &StoreBase::Absent, "new"), "Unavailable");
    assert_eq!(admitted(&ledger, "a", &StoreBase::Any, "new"), "Any [] or absent");
}

/// The outcome of a condition, in a word.
fn admitted(ledger: &Ledger, key: &str, condition: &StoreBase, mark: &str) -> String {
    match ledger.admit(&at(key), condition, mark) {
        Ok(Admitted::Known(etag)) => format!("known {etag}"),
        Ok(Admitted::New(UploadBase { base, begun, may_be_absent })) => {
            format!("{base:?} {begun:?}{}", if may_be_absent { " or absent" } else { "" })
        }
        Err(failure) => format!("{:?}", failure.error.kind()),
    }
}

#[test]
fn conditions_are_compared_with_the_newest_object_of_the_name() {
    let mut ledger = with_entries(&["a"]);
    let cases = [
        (StoreBase::Any, "Any []"),
        (StoreBase::Absent, "Stale"),
        (version("staged-mark-0"), "Absent []"),
        (version("staged-other"), "Stale"),
        (version("etag"), "Stale"),
    ];
    for (condition, expected) in &cases {
        assert_eq!(admitted(&ledger, "a", condition, "new"), *expected, "{condition:?}");
        assert_eq!(admitted(&ledger, "a", condition, "mark-0"), "known staged-mark-0", "{condition:?}");
    }
    // The upload has begun: the store may have the object.
    let job = ledger.take_job(Instant::now() + Duration::from_secs(5)).ok().unwrap();
    assert_eq!(admitted(&ledger, "a", &version("staged-mark-0"), "new"), "Absent [\"mark-0\"]");
    ledger.note_saved(&job, "real", &BTreeSet::new(), Instant::now());
    let cases = [
        (StoreBase::Any, "Any []"),
        (StoreBase::Absent, "Stale"),
        (version("staged-mark-0"), "Version(\"real\") []"),
        (version("staged-other"), "Stale"),
    ];
    for (condition, expected) in &cases {
        assert_eq!(admitted(&ledger, "a", condition, "new"), *expected, "{condition:?}");
    }
    assert_eq!(admitted(&ledger, "b", &StoreBase::Absent, "new"), "Absent []");
    ledger.note_taken(&at("a"), "mark-0");
    ledger.forget_saved(&at("a"));
    assert_eq!(admitted(&ledger, "a", &StoreBase::Any, "mark-0"), "known staged-mark-0");
    // All copies of the rename of a folder have one mark.
    assert_eq!(admitted(&ledger, "b", &StoreBase::Any, "mark-0"), "Any []");
}

#[test]
fn no_upload_begins_while_the_name_is_changed() {
    let mut ledger = with_entries(&["a"]);
    ledger.locked.insert(at("a"));
    let later = Instant::now() + Duration::from_secs(5);
    assert!(ledger.take_job(later).is_err());
    ledger.locked.clear();
    assert!(ledger.take_job(later + LOCKED_NAME_PAUSE).is_ok());
}

fn names_of(ledger: &Ledger, prefix: &str, after: &str, is_folded: bool) -> Vec<String> {
    ledger.find_below(&at(prefix), after, is_folded).names.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn names_are_found_by_prefix_and_folded() {
    let ledger = with_entries(&["a", "a/b", "a/c/d", "a/c/e", "a-b", "b/x", "c"]);
    assert_eq!(names_of(&ledger, "", "", true), ["a", "a-b", "a/", "b/", "c"]);
    assert_eq!(names_of(&ledger, "", "a-b", true), ["a/", "b/", "c"]);
    assert_eq!(names_of(&ledger, "", "a/", true), ["b/", "c"]);
    assert_eq!(names_of(&ledger, "a/", "", true), ["a/b", "a/c/"]);
    assert_eq!(names_of(&ledger, "a/", "a/c/", true), [""; 0]);
    assert_eq!(names_of(&ledger, "", "", false), ["a", "a-b", "a/b", "a/c/d", "a/c/e", "b/x", "c"]);
    assert_eq!(names_of(&ledger, "a/c", "a/c/d", false), ["a/c/e"]);
}

#[test]
fn pages_have_each_name_once() {
    let keys: Vec<String> = (0..2 * STAGED_NAMES_MAX + 30).map(|number| format!("f{:05}/x", number)).collect();
    let mut ledger = with_entries(&keys.iter().map(String::as_str).collect::<Vec<_>>());
    // Every other object is uploaded.
    let later = Instant::now() + Duration::from_secs(5);
    for number in 0..keys.len() {
        let job = ledger.take_job(later).ok().unwrap();
        if number % 2 == 0 {
            ledger.note_saved(&job, "real", &BTreeSet::new(), later);
        }
    }
    for is_folded in [false, true] {
        let mut found = Vec::new();
        let mut after = String::new();
        loop {
            let below = ledger.find_below(&at(""), &after, is_folded);
            let Some((last, _)) = below.names.last() else { break };
            after.clone_from(last);
            found.extend(below.names.into_iter().map(|(name, _)| name));
            if !below.has_more {
                break;
            }
        }
        let expected: Vec<String> =
            keys.iter().map(|key| if is_folded { key.replace("/x", "/") } else { key.clone() }).collect();
        assert!(found == expected, "{} names of {}", found.len(), expected.len());
    }
}

#[test]
fn scratch_ends_by_age_and_by_quota_and_late_objects_are_named_once() {
    let start = Instant::now();
    let mut ledger = Ledger::default();
    for (number, key) in ["a", "b", "c", "d"].iter().enumerate() {
        let class = StageClass::Scratch { ttl_s: 100, quota: 6, folder: 1 };
        let scratch = Manifest { class, ..sample(key, &format!("mark-{number}"), number as u64) };
        ledger.enter(scratch, start + Duration::from_secs(number as u64), false);
    }
    ledger.enter(sample("waits", "mark-waits", 9), start, false);
    assert_eq!((ledger.unsaved.count(), ledger.unsaved.bytes()), (1, 3));
    assert_eq!(ledger.expired_scratch(start), [at("a"), at("b")], "of 12 bytes 6 may stay");
    assert_eq!(ledger.expired_scratch(start + Duration::from_secs(102)), [at("a"), at("b"), at("c")]);
    ledger.remove(&at("a"), []);
    ledger.remove(&at("b"), []);
    assert!(ledger.expired_scratch(start).is_empty());

    let deadline = Duration::from_secs(60);
    let late = |ledger: &mut Ledger, after: u64| ledger.new_late(start + Duration::from_secs(after), deadline).len();
    assert_eq!([59, 60, 61].map(|after| late(&mut ledger, after)), [0, 1, 0]);
}

fn version(etag: &str) -> StoreBase {
    StoreBase::Version(etag.to_owned())
}
