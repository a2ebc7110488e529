//! The changes of a file that are not published, where a source shows a file's changes all at once: what has to be said beside the
//! pieces of bytes to have them in another process. Knows no requests.
//!
//! The process of an open file has the changes. The mount keeps the pieces until they are published, and how the file was cut since:
//! with both, the next process continues when this one is lost. Pieces that were released for want of memory are only there, and
//! the file fails with that process.

use parking_lot::{Mutex, MutexGuard};
use spurline_types::{Error, Result};
use spurline_volume::writes::AttrChange;

/// How a file was cut since it was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileCut {
    /// The published bytes count up to here.
    pub kept: u64,
    /// The length after the last cut.
    pub len: u64,
}

#[derive(Default)]
struct ChangeCounts {
    /// Changes until now, and the number of published changes.
    made: u64,
    published: u64,
    /// The first change was the creation of the file.
    created: bool,
    cut: Option<FileCut>,
    /// The number of changes at the last cut.
    cut_at: u64,
    /// Attributes that are published with the bytes.
    attrs: AttrChange,
    /// The process got these attributes before bytes that have changed the times again.
    times_overwritten: bool,
    /// Not all bytes that the process has can be sent again.
    incomplete: bool,
    /// The name leads to another object, or to none: nothing is published any more.
    removed: bool,
    /// Why the changes can't be published.
    failed: Option<Error>,
}

/// The process that has the changes.
#[derive(Default)]
pub(crate) struct ChangesPlace {
    /// The number of the pending version there.
    pub number: u64,
    /// The process does not have all changes yet.
    pub restoring: bool,
}

/// The changes of a file that are not published.
#[derive(Default)]
pub(crate) struct UnpublishedChanges {
    counts: Mutex<ChangeCounts>,
    /// Held during a publication.
    publishing: Mutex<()>,
    /// Held while another process gets the changes.
    place: Mutex<ChangesPlace>,
}

impl UnpublishedChanges {
    /// The file was changed.
    pub fn note_change(&self) {
        let mut counts = self.counts.lock();
        counts.made += 1;
        // The time of this change counts.
        counts.attrs.mtime = None;
    }

    /// Attributes were set that are published with the bytes.
    pub fn note_attrs(&self, set: &AttrChange) {
        let mut counts = self.counts.lock();
        let known = counts.attrs;
        counts.attrs = AttrChange {
            mode: set.mode.or(known.mode),
            uid: set.uid.or(known.uid),
            gid: set.gid.or(known.gid),
            size: None,
            atime: set.atime.or(known.atime),
            mtime: set.mtime.or(known.mtime),
        };
    }

    /// The attributes for another process, which gets the bytes later.
    pub fn begin_restoring_attrs(&self) -> Option<AttrChange> {
        let mut counts = self.counts.lock();
        let attrs = Some(counts.attrs).filter(|attrs| *attrs != AttrChange::default());
        counts.times_overwritten = attrs.is_some();
        attrs
    }

    /// The attributes that another process has got before the bytes, which are there now.
    pub fn end_restoring_attrs(&self) -> Option<AttrChange> {
        let mut counts = self.counts.lock();
        let attrs = counts.attrs;
        std::mem::take(&mut counts.times_overwritten).then_some(attrs)
    }

    /// The file has this length now, and no bytes behind it.
    pub fn note_cut(&self, len: u64) {
        let mut counts = self.counts.lock();
        counts.made += 1;
        counts.cut_at = counts.made;
        let kept = counts.cut.map_or(len, |cut| cut.kept.min(len));
        counts.cut = Some(FileCut { kept, len });
    }

    /// How the file was cut since it was published.
    pub fn cut(&self) -> Option<FileCut> {
        self.counts.lock().cut
    }

    /// Whether there is something to publish.
    pub fn is_changed(&self) -> bool {
        let counts = self.counts.lock();
        counts.made > counts.published && !counts.removed && counts.failed.is_none()
    }

    /// Whether everything is published, and later changes can be.
    pub fn is_unchanged(&self) -> bool {
        let counts = self.counts.lock();
        counts.made == counts.published && !counts.removed && counts.failed.is_none()
    }

    /// The file is new, and its creation is all that is to be published.
    pub fn is_only_created(&self) -> bool {
        let counts = self.counts.lock();
        counts.created && counts.made == 1 && counts.published == 0 && counts.attrs == AttrChange::default()
    }

    /// The file was made.
    pub fn note_creation(&self) {
        self.note_change();
        self.counts.lock().created = true;
    }

    /// Whether the file has changes that are lost if they end here: they are not published, and the name still leads to the file.
    pub fn has_lost_changes(&self) -> bool {
        let counts = self.counts.lock();
        counts.made > counts.published && !counts.removed
    }

    /// Begins a publication; the next one waits for its end.
    pub fn begin_publication(&self) -> MutexGuard<'_, ()> {
        self.publishing.lock()
    }

    /// The number of changes until now.
    pub fn count(&self) -> u64 {
        self.counts.lock().made
    }

    /// The first `count` changes are published. False if the file was cut meanwhile: the length before counts until the next
    /// publication.
    pub fn end_publication(&self, count: u64) -> bool {
        let mut counts = self.counts.lock();
        counts.published = counts.published.max(count);
        if counts.cut_at > count {
            return false;
        }
        counts.cut = None;
        counts.attrs = AttrChange::default();
        counts.incomplete &= counts.made > count;
        true
    }

    /// Bytes that only the process has can't be sent again.
    pub fn note_incomplete(&self) {
        self.counts.lock().incomplete = true;
    }

    /// Whether all changes can be had in another process.
    pub fn is_complete(&self) -> bool {
        !self.counts.lock().incomplete
    }

    /// The name leads to another object, or to none.
    pub fn note_removed(&self) {
        self.counts.lock().removed = true;
    }

    /// Whether changes can still be published.
    pub fn is_published_by_close(&self) -> bool {
        let counts = self.counts.lock();
        !counts.removed && counts.failed.is_none()
    }

    /// Whether [`UnpublishedChanges::note_removed`] was called.
    pub fn is_removed(&self) -> bool {
        self.counts.lock().removed
    }

    /// The changes can't be published: nothing is, and every call fails.
    pub fn fail(&self, error: Error) {
        self.counts.lock().failed.get_or_insert(error);
    }

    /// Fails after [`UnpublishedChanges::fail`].
    pub fn check(&self) -> Result<()> {
        self.counts.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// Where the changes are; no other process gets the changes while the guard lives.
    pub fn hold_place(&self) -> MutexGuard<'_, ChangesPlace> {
        self.place.lock()
    }

    /// As [`UnpublishedChanges::hold_place`]; `None` while another process gets the changes.
    pub fn try_hold_place(&self) -> Option<MutexGuard<'_, ChangesPlace>> {
        self.place.try_lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_keeps_no_more_than_the_shortest_length_since_the_publication() {
        let changes = UnpublishedChanges::default();
        for len in [100, 20, 50] {
            changes.note_cut(len);
        }
        assert_eq!(changes.cut(), Some(FileCut { kept: 20, len: 50 }));
        let count = changes.count();
        changes.note_cut(30);
        assert!(!changes.end_publication(count) && changes.is_changed(), "the last cut is not published");
        assert_eq!(changes.cut(), Some(FileCut { kept: 20, len: 30 }));
        assert!(changes.end_publication(changes.count()) && !changes.is_changed());
        assert_eq!(changes.cut(), None);
    }

    #[test]
    fn attributes_go_to_another_process_and_again_after_the_bytes() {
        let changes = UnpublishedChanges::default();
        assert_eq!((changes.begin_restoring_attrs(), changes.end_restoring_attrs()), (None, None));
        changes.note_change();
        changes.note_attrs(&AttrChange { mode: Some(0o600), size: Some(7), ..AttrChange::default() });
        changes.note_attrs(&AttrChange { uid: Some(1), ..AttrChange::default() });
        let attrs = AttrChange { mode: Some(0o600), uid: Some(1), ..AttrChange::default() };
        assert_eq!(changes.begin_restoring_attrs(), Some(attrs));
        assert_eq!((changes.end_restoring_attrs(), changes.end_restoring_attrs()), (Some(attrs), None));
        assert!(changes.end_publication(changes.count()));
        assert_eq!(changes.begin_restoring_attrs(), None);
    }

    #[test]
    fn a_publication_ends_what_came_before() {
        let changes = UnpublishedChanges::default();
        assert!(!changes.is_changed());
        changes.note_change();
        changes.note_incomplete();
        let count = changes.count();
        changes.note_change();
        assert!(changes.end_publication(count) && changes.is_changed() && !changes.is_complete());
        assert!(changes.end_publication(changes.count()) && !changes.is_changed() && changes.is_complete());
        changes.note_change();
        changes.note_removed();
        assert!(!changes.is_changed(), "no name leads to it");
    }
}
