//! Merged pages: names of the store and of the group.

use super::*;
use crate::backend::time_at;
use crate::manifest_samples::sample;
use crate::message::SavedName;

fn stored(key: &str, etag: &str) -> RawObject {
    RawObject { key: key.to_owned(), size: 1, mtime: time_at(1), etag: Some(etag.to_owned()) }
}

fn shown(page: &RawPage) -> Vec<String> {
    let objects =
        page.objects.iter().map(|object| format!("{}={}", object.key, object.etag.clone().unwrap_or_default()));
    page.prefixes.iter().cloned().chain(objects).collect()
}

fn staged(names: &[&str]) -> Vec<(String, KnownName)> {
    let object = |name: &&str| ((*name).to_owned(), KnownName::Object(Box::new(sample(name, name, 1))));
    names.iter().map(object).collect()
}

#[test]
fn a_page_has_staged_names_among_those_of_the_store() {
    let page = || RawPage {
        objects: vec![stored("b", "1"), stored("d", "2"), stored("f", "3"), stored("h", "4")],
        prefixes: vec!["e/".to_owned()],
        next: None,
    };
    let mut names = staged(&["a", "d"]);
    names.push(("c/".to_owned(), KnownName::Folder));
    names.push(("e/".to_owned(), KnownName::Folder));
    names.push(("f".to_owned(), KnownName::Removing));
    let saved = SavedName { real: "4".to_owned(), etag: "staged-h".to_owned(), closed_s: Some(5) };
    names.push(("h".to_owned(), KnownName::Saved(saved)));
    let all = shown(&merge(page(), names.clone(), "", None));
    assert_eq!(all, ["c/", "e/", "a=staged-a", "b=1", "d=staged-d", "h=staged-h"]);
    // A page ends where the store's page or the leader's answer ends.
    assert_eq!(shown(&merge(page(), names.clone(), "", Some("c/"))), ["c/", "a=staged-a", "b=1"]);
    assert_eq!(shown(&merge(page(), names.clone(), "c/", Some("e/"))), ["e/", "d=staged-d"]);
    assert_eq!(shown(&merge(page(), names, "e/", None)), ["h=staged-h"]);
}

#[test]
fn an_object_that_a_stranger_has_replaced_since_has_that_version() {
    let saved = SavedName { real: "1".to_owned(), etag: "staged-a".to_owned(), closed_s: Some(5) };
    let names = vec![("a".to_owned(), KnownName::Saved(saved))];
    let page = RawPage { objects: vec![stored("a", "other")], prefixes: Vec::new(), next: None };
    assert_eq!(shown(&merge(page, names.clone(), "", None)), ["a=other"]);
    // The store does not have the object any more.
    assert_eq!(shown(&merge(RawPage::default(), names, "", None)), [""; 0]);
}

#[test]
fn a_place_is_found_again_by_the_token() {
    let place = MergedPlace { token: Some("the store's \"token\"".to_owned()), after: "a/ü".to_owned() };
    let again = MergedPlace::from_token(Some(&place.to_token().unwrap())).unwrap();
    assert_eq!((again.token, again.after), (place.token, place.after));
    assert_eq!(MergedPlace::from_token(None).unwrap().after, "");
    assert_eq!(MergedPlace::from_token(Some("x")).err().unwrap().error.kind(), ErrorKind::Invalid);
}
