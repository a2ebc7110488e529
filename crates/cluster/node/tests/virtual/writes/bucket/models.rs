//! Contents that a bucket may have, and those that have to be there. Knows neither mounts nor faults.

use super::super::programs::locked;
use super::store::{SimStore, hash_of};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

pub const DOCUMENT_COUNT: usize = 3;

/// A file that one program at a time writes, and that strangers replace.
#[derive(Default)]
pub struct DocumentModel {
    /// A name for each time that a call failed: the file has one of several contents then.
    pub generation: u32,
    pub exists: bool,
    pub content: Vec<u8>,
    pub readers: usize,
    pub writing: bool,
    /// How often a stranger has replaced it.
    pub strangers: u64,
}

/// The bucket of a run, and the knowledge of its programs.
pub struct BucketModel {
    pub store: SimStore,
    /// A length of documents that takes several parts.
    pub large_document: usize,
    pub documents: [Mutex<DocumentModel>; DOCUMENT_COUNT],
    /// The hashes of all contents that a program was about to publish under a name.
    contents: Mutex<BTreeMap<String, BTreeSet<u64>>>,
    /// The content of each exclusive creation that was acknowledged.
    winners: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl BucketModel {
    pub fn new(store: SimStore, large_document: usize) -> BucketModel {
        let documents = Default::default();
        BucketModel { store, large_document, documents, contents: Mutex::default(), winners: Mutex::default() }
    }

    /// A program is about to publish this content.
    pub fn note_content(&self, name: &str, content: &[u8]) {
        let mut contents = locked(&self.contents);
        contents.entry(name.to_owned()).or_default().insert(hash_of(content));
    }

    pub fn note_winner(&self, name: &str, content: &[u8]) {
        let mut winners = locked(&self.winners);
        let before = winners.insert(name.to_owned(), content.to_vec());
        assert!(before.is_none(), "two programs have created {name} exclusively");
    }

    /// All versions that the objects had were published by a program, or written by a stranger.
    pub fn check(&self) {
        for (name, known) in &*locked(&self.contents) {
            for (number, version) in self.store.versions(name).iter().enumerate() {
                let Some(version) = version else { continue };
                let is_known = version.writer.is_none() || known.contains(&hash_of(&version.bytes));
                let len = version.bytes.len();
                assert!(is_known, "version {number} of {name} has {len} bytes that no program has published");
            }
        }
        for (name, content) in &*locked(&self.winners) {
            let found = self.store.content(name);
            assert!(
                found.is_some_and(|found| found == content),
                "{name} has not the bytes of the program that made it"
            );
        }
        for (number, document) in self.documents.iter().enumerate() {
            let document = locked(document);
            let name = format!("document-{number}-{}", document.generation);
            if document.exists {
                let found = self.store.content(&name);
                assert!(found.is_some_and(|found| found == document.content), "{name} is not as it was closed");
            }
        }
    }
}
