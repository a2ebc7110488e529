//! The facts of an open file that calls on names need. They are never locked during a request. Knows no byte.

use super::state::{ObjectEvent, ObjectState, Publication};
use crate::file_attrs::FileAttrs;
use spurline_object_store::{WriteCondition, bare_etag};
use spurline_origin::object_attr;
use spurline_types::{Error, ErrorKind, ObjectAttr, Result};
use std::time::{Duration, Instant, SystemTime};

pub(super) struct ObjectFacts {
    pub path: Vec<u8>,
    /// The object as it was read or published; `None` before a new file is published.
    pub published: Option<ObjectAttr>,
    /// The step that has found or made it so.
    pub found_at: u64,
    /// The length with the changes.
    pub len: u64,
    pub state: ObjectState,
    /// The time of the file while its bytes are not those of the object.
    pub changed_at: SystemTime,
    /// Owner, mode, times and extended attributes with the changes; only headers without `object_attrs`.
    pub file_attrs: FileAttrs,
    /// The attributes differ from those in the object's metadata, whose bytes may be published.
    pub attrs_changed: bool,
    /// The time of the last change was set since the last write.
    pub mtime_is_set: bool,
    /// Why the changes until now could not be published, as a call of the program that writes them has reported.
    pub reported_failure: Option<ReportedFailure>,
}

/// A failure of a publication that a program knows.
#[derive(Clone)]
pub(super) struct ReportedFailure {
    pub error: Error,
    at: Instant,
}

impl ReportedFailure {
    /// A failure that is reported now.
    pub fn now(error: Error) -> ReportedFailure {
        ReportedFailure { error, at: Instant::now() }
    }

    /// Whether a call got no answer of the store, less than `time` ago.
    pub fn is_recent_timeout(&self, time: Duration) -> bool {
        self.error.kind() == ErrorKind::Timeout && self.at.elapsed() < time
    }
}

impl ObjectFacts {
    pub fn new(path: Vec<u8>, published: Option<ObjectAttr>, file_attrs: FileAttrs) -> ObjectFacts {
        ObjectFacts {
            path,
            len: published.as_ref().map_or(0, |attr| attr.size),
            state: if published.is_some() { ObjectState::Clean } else { ObjectState::Changed },
            published,
            found_at: 0,
            changed_at: SystemTime::now(),
            file_attrs,
            attrs_changed: false,
            mtime_is_set: false,
            reported_failure: None,
        }
    }

    /// The state is the one after an event; whether that is another one.
    pub fn apply(&mut self, event: ObjectEvent) -> bool {
        self.changed_at = self.mtime();
        let before = std::mem::take(&mut self.state);
        let before_kind = std::mem::discriminant(&before);
        self.state = before.after(event);
        std::mem::discriminant(&self.state) != before_kind
    }

    /// As [`ObjectState::publication`].
    pub fn publication(&self) -> Result<Publication> {
        self.state.publication(self.attrs_changed)
    }

    /// What must be true of the object when the file is published.
    pub fn condition(&self, last_writer_wins: bool) -> WriteCondition {
        if last_writer_wins {
            return WriteCondition::None;
        }
        match (&self.published, self.published_etag()) {
            (None, _) => WriteCondition::Absent,
            (Some(_), Some(etag)) => WriteCondition::Version(etag.to_owned()),
            (Some(_), None) => WriteCondition::None,
        }
    }

    /// The length with the changes, a write without space included.
    pub fn changed_len(&self) -> u64 {
        match &self.state {
            ObjectState::Lost(lost) => self.len.max(lost.offset + lost.len),
            _ => self.len,
        }
    }

    /// The path as messages have it.
    pub fn shown_path(&self) -> String {
        String::from_utf8_lossy(&self.path).into_owned()
    }

    fn mtime(&self) -> SystemTime {
        self.published.as_ref().filter(|_| self.state.is_clean()).map_or(self.changed_at, |attr| attr.mtime)
    }

    /// The attributes with the changes.
    pub fn attr(&self) -> ObjectAttr {
        let attr = self.published.clone().unwrap_or_else(|| object_attr(0, self.changed_at, String::new()));
        ObjectAttr { mtime: self.mtime(), size: self.len, ..attr }
    }

    /// The object of an upload has the attributes of the file when it began. A time of the last write that only this process
    /// knows is worth no copy.
    pub fn note_uploaded_attrs(&mut self, stored: &FileAttrs) {
        if !self.mtime_is_set {
            self.file_attrs.mtime = stored.mtime;
        }
        self.attrs_changed = self.file_attrs != *stored;
    }

    pub fn published_etag(&self) -> Option<&str> {
        self.published.as_ref().and_then(|attr| attr.etag.as_deref()).map(bare_etag)
    }
}
