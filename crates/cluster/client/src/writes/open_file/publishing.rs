//! Publishes the changes of files, where a source shows all changes of a file at once: the process of a file makes the changes visible,
//! and the file has another identity afterwards. Knows neither pieces nor names of the kernel.

use super::syncing::unless_closed;
use super::{FileOpening, FilePlace, MOVES_PER_CALL_MAX, OpenFile, OpenFiles, change_open};
use crate::writes::bytes::FileBytes;
use crate::writes::calls::{
    CallDeadline, CallEnd, CallTarget, HomeProcess, NodeAnswer, RequestContext, WriteCallPlan, attr_of, is_transient,
    settle_answer, unsteady,
};
use spurline_proto::{WriteAnswer, WriteCall};
use spurline_types::errno::{EIO, ESTALE};
use spurline_types::open_flags::{O_ACCMODE, O_EXCL, O_RDONLY};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{AttrChange, Caller, FileIdentity, NodeAttr, NodePath, PendingVersion};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The number of a pending version that no process has under this number.
const UNKNOWN_VERSION: u64 = u64::MAX;

impl OpenFiles {
    /// Whether the source shows the changes of a file when they are published.
    pub fn publishes(&self) -> bool {
        self.publishes.load(Ordering::Relaxed)
    }

    /// The open file with unpublished changes that a path leads to.
    pub fn find_changed(&self, path: &[u8]) -> Option<Arc<OpenFile>> {
        if !self.publishes() {
            return None;
        }
        self.find_open(|open| open.bytes.unpublished.is_changed() && open.place.lock().path == path)
    }

    /// The open files with unpublished changes directly in a directory, by their names there.
    pub fn changed_in(&self, directory: &[u8]) -> BTreeMap<Vec<u8>, Arc<OpenFile>> {
        let open = self.open_files().into_iter().filter(|open| open.bytes.unpublished.is_changed());
        let named = open.filter_map(|open| {
            let path = open.current_path();
            let name = if directory.is_empty() {
                path.as_slice()
            } else {
                path.strip_prefix(directory).and_then(|rest| rest.strip_prefix(b"/"))?
            };
            let is_direct = !name.is_empty() && !name.contains(&b'/');
            is_direct.then(|| (name.to_vec(), open))
        });
        named.collect()
    }

    /// Whether a file below a directory has unpublished changes.
    pub fn has_changed_below(&self, directory: &[u8]) -> bool {
        self.open_files().iter().any(|open| open.bytes.unpublished.is_changed() && open.is_below(directory))
    }

    /// The open file whose process a further open for changes goes to: a publication has the changes of one process.
    pub fn find_beside(&self, at: NodePath<'_>, flags: u32) -> Option<Arc<OpenFile>> {
        if !self.publishes() || flags & O_ACCMODE == O_RDONLY || at.expected.is_none() {
            return None;
        }
        self.find_open(|open| {
            let place = open.place.lock();
            open.writes() && place.path == at.path && place.identity == at.expected
        })
    }

    /// The open file of a path that can write, whose close publishes.
    pub fn find_writer(&self, path: &[u8]) -> Option<Arc<OpenFile>> {
        if !self.publishes() {
            return None;
        }
        self.find_open(|open| {
            open.writes() && open.bytes.unpublished.is_published_by_close() && open.place.lock().path == path
        })
    }

    /// The bytes of a file that a process has opened. A process has the file of a path once for this mount: open files without changes
    /// go over to the version that a later open has found.
    pub fn bytes_of_opened(&self, path: &[u8], opened: &FileOpening<'_>) -> Arc<FileBytes> {
        let identity = opened.attr.identity;
        if !self.publishes() {
            return self.bytes_of(identity);
        }
        let beside = self.open_files().into_iter().find(|open| {
            open.flags.is_some()
                && open.home() == opened.home
                && open.place.lock().path == path
                && open.bytes.unpublished.is_unchanged()
        });
        let Some(open) = beside else { return self.bytes_of(identity) };
        open.bytes.note_size(opened.attr.size);
        self.adopt_identity(&open.bytes, identity);
        Arc::clone(&open.bytes)
    }

    /// Publishes the changes of a file.
    ///
    /// # Errors
    /// `ESTALE` when another writer has changed the object, `EIO` when changes are lost, both for good; the errors of the nodes
    /// and of the source. Nothing is published then.
    pub fn publish(&self, opened: &OpenFile) -> Result<()> {
        let bytes = &opened.bytes;
        let unpublished = &bytes.unpublished;
        let _one = unpublished.begin_publication();
        unpublished.check()?;
        if !unpublished.is_changed() {
            return Ok(());
        }
        let count = unpublished.count();
        let deadline = self.calls.begin_publication(bytes.end());
        let published = self.publish_at_process(opened, deadline)?;
        let identity = published.attr.identity;
        if unpublished.end_publication(count) {
            bytes.list.lock().release(published.mark, published.stamp, published.by);
        }
        self.adopt_identity(bytes, identity);
        Ok(())
    }

    fn publish_at_process(&self, opened: &OpenFile, deadline: CallDeadline) -> Result<PublishedFile> {
        let bytes = &opened.bytes;
        let call = WriteCall::Sync { file: opened.number(), data_only: true };
        for _ in 0..MOVES_PER_CALL_MAX {
            self.send_all(bytes)?;
            // Refused bytes are missing.
            bytes.unpublished.check()?;
            if let Some(set) = bytes.unpublished.end_restoring_attrs() {
                let call = WriteCall::SetAttrOpen { file: opened.number(), set };
                change_open(self, opened, &call, RequestContext::of(&Caller::default()))?;
            }
            let home = opened.home();
            let mut list = bytes.list.lock();
            let mark = list.mark();
            let stamp = list.stamp();
            let elsewhere = list.sent_elsewhere(mark, home.instance);
            drop(list);
            if let Some(process) = elsewhere {
                self.resend_from(opened, process);
                continue;
            }
            let plan = WriteCallPlan::query(CallTarget::Process(&home), &call, opened.caller(), deadline);
            match self.calls.run(plan) {
                Ok(sent) if sent.answer == WriteAnswer::UnknownFile => opened.note_unknown(self, &home),
                Ok(sent) => {
                    let attr = settle_answer(sent.answer).and_then(attr_of);
                    let attr = attr.inspect_err(|error| self.note_conflict(opened, error))?;
                    return Ok(PublishedFile { attr, mark, stamp, by: home.instance });
                }
                Err(CallEnd::Lost { .. }) => {}
                Err(CallEnd::Failed(error)) => return Err(error),
            }
            opened.move_on(self, &home, deadline)?;
        }
        Err(unsteady())
    }

    /// The changes of a file can't be published if another writer has changed the object.
    fn note_conflict(&self, opened: &OpenFile, error: &Error) {
        if error.kind() == ErrorKind::Stale {
            tracing::error!("{} is not written: {error}", opened.logged_path());
            self.fail_changes(&opened.bytes, error.clone());
        }
    }

    /// The changes of a file are lost: all open files of the object fail until the close, and later opens begin with the published
    /// object.
    pub fn fail_changes(&self, bytes: &Arc<FileBytes>, error: Error) {
        bytes.unpublished.fail(error);
        bytes.list.lock().forget_all(&self.client.stats);
        self.files.lock().retain(|_, known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(bytes)));
    }

    /// The file is another object for the source.
    pub fn adopt_identity(&self, bytes: &Arc<FileBytes>, identity: FileIdentity) {
        for open in self.open_files() {
            if Arc::ptr_eq(&open.bytes, bytes) {
                open.place.lock().identity = Some(identity);
            }
        }
        let mut files = self.files.lock();
        files.retain(|_, known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(bytes)));
        files.insert(identity, Arc::downgrade(bytes));
    }

    /// Attributes of a file were set: they are published with its bytes, or by a change of the object, which is another object then.
    pub fn note_attrs(&self, bytes: &Arc<FileBytes>, set: &AttrChange, after: &NodeAttr) {
        if bytes.unpublished.is_changed() {
            bytes.unpublished.note_attrs(set);
        }
        self.adopt_identity(bytes, after.identity);
    }

    /// Publishes the changed files at and below a path.
    ///
    /// # Errors
    /// As [`OpenFiles::publish`].
    pub fn publish_below(&self, path: &[u8]) -> Result<()> {
        for open in self.open_files() {
            if open.bytes.unpublished.is_changed() && open.is_below(path) {
                unless_closed(&open, self.publish(&open))?;
            }
        }
        Ok(())
    }

    /// A name leads to nothing any more, or to another object.
    pub fn note_removed(&self, path: &[u8]) {
        for open in self.open_files() {
            if open.current_path() == path {
                open.bytes.unpublished.note_removed();
            }
        }
    }

    /// Open files at and below a path were renamed: the homes of the new paths open the objects there.
    pub fn follow_renamed(&self, path: &[u8]) {
        for open in self.open_files() {
            if open.flags.is_none() || !open.is_below(path) || open.bytes.unpublished.is_removed() {
                continue;
            }
            open.bytes.unpublished.hold_place().number = UNKNOWN_VERSION;
            let home = open.home();
            let mut deadline = self.calls.begin();
            let mut moved = open.move_on(self, &home, deadline);
            if moved.as_ref().is_err_and(is_transient) {
                // One lost answer ends no open file.
                deadline = self.calls.begin();
                moved = open.move_on(self, &home, deadline);
            }
            match moved {
                Ok(()) => open.lock_again(self, deadline),
                Err(_) if open.is_closed() => {}
                Err(error) => {
                    let path = open.logged_path();
                    tracing::warn!("{path}, which is open, was renamed and can't be opened again: {error}");
                    self.fail_changes(&open.bytes, error);
                }
            }
        }
    }

    /// Releases bytes that a process has, before they are published: only that process has them from now on.
    ///
    /// # Errors
    /// When no node takes unsent bytes.
    pub(super) fn release_unpublished(&self, opened: &OpenFile) -> Result<()> {
        self.send_all(&opened.bytes)?;
        opened.bytes.unpublished.note_incomplete();
        self.forget_sent(opened);
        Ok(())
    }

    /// Forgets the bytes that the process of an open file has, unless the file moves.
    pub(super) fn forget_sent(&self, opened: &OpenFile) {
        if let Some(_stays) = opened.bytes.unpublished.try_hold_place() {
            opened.bytes.list.lock().forget_sent_to(opened.home().instance);
        }
    }

    /// Notes the changes of a file that end with this open file and were not published, unless a program's close has reported that.
    pub(super) fn note_unpublished_loss(&self, opened: &OpenFile, error: Option<&Error>) {
        let bytes = &opened.bytes;
        if !bytes.unpublished.has_lost_changes() || opened.failed_close() || self.has_further_opens(opened) {
            return;
        }
        let failure = bytes.unpublished.check().err();
        let why = failure.as_ref().or(error).map_or_else(String::new, |error| format!(": {error}"));
        tracing::error!("the changes of {} are lost, they are not published{why}", opened.logged_path());
        self.losses.lock().add_file(opened.shown_path(), bytes.end());
    }

    /// Whether the mount has the file open once more.
    fn has_further_opens(&self, opened: &OpenFile) -> bool {
        self.find_open(|other| Arc::ptr_eq(&other.bytes, &opened.bytes) && other.number() != opened.number()).is_some()
    }

    /// Sends or publishes the changes of a file that the program has closed.
    ///
    /// # Errors
    /// As [`OpenFiles::send_all`] and [`OpenFiles::publish`].
    pub(super) fn finish_changes(&self, opened: &OpenFile) -> Result<()> {
        if !self.publishes() || self.has_further_opens(opened) {
            return self.send_all(&opened.bytes);
        }
        if opened.bytes.unpublished.is_removed() {
            opened.bytes.list.lock().forget_all(&self.client.stats);
            return Ok(());
        }
        self.publish(opened)
    }
}

/// A file that was published.
struct PublishedFile {
    attr: NodeAttr,
    /// The pieces below this number were sent before.
    mark: u64,
    /// The number of answers before.
    stamp: u64,
    /// The process.
    by: u64,
}

impl OpenFile {
    /// Opens the file on a node that can be reached, and restores the changes there unless that node has all changes.
    pub(super) fn continue_at_next(
        &self,
        files: &OpenFiles,
        lost: &HomeProcess,
        deadline: CallDeadline,
    ) -> Result<HomeProcess> {
        let unpublished = &self.bytes.unpublished;
        unpublished.check()?;
        let mut place = unpublished.hold_place();
        let is_changed = unpublished.is_changed();
        let can_restore = !is_changed || unpublished.is_complete();
        let next = if can_restore { files.calls.new_file_number() } else { 0 };
        // A lock makes a file without changes continue with what others have published.
        let is_untouched = unpublished.is_only_created() && !self.has_flag(O_EXCL);
        let follows = is_untouched || !is_changed && self.was_locked();
        let pending = PendingVersion { known: place.number, next, follows };
        let opened = self.open_next(files, lost, pending, deadline).inspect_err(|error| {
            if is_changed && error.kind() == ErrorKind::Io(ESTALE) {
                files.fail_changes(&self.bytes, error.clone());
            }
        })?;
        let NodeAnswer { answer, home, .. } = opened;
        let attr = match answer {
            WriteAnswer::Attr(attr) => attr,
            WriteAnswer::Opened(attr, _) => {
                place.number = next;
                place.restoring = true;
                attr
            }
            _ => {
                let error = lost_changes(lost);
                tracing::error!("{}: {error}", self.logged_path());
                files.fail_changes(&self.bytes, error.clone());
                return Err(error);
            }
        };
        if place.restoring {
            let restored = self.restore_changes(files, &home, deadline);
            if let Err(error) = restored {
                files.calls.close_later(&home, &[self.number]);
                return Err(error);
            }
            place.restoring = false;
        }
        files.adopt_identity(&self.bytes, attr.identity);
        Ok(home)
    }

    /// Cuts the file as before, in a process that has opened the file anew, and has all pieces sent there.
    fn restore_changes(&self, files: &OpenFiles, home: &HomeProcess, deadline: CallDeadline) -> Result<()> {
        let root = Caller::default();
        let cut = self.bytes.unpublished.cut();
        for len in cut.iter().flat_map(|cut| [cut.kept, cut.len]) {
            let set = AttrChange { size: Some(len), ..AttrChange::default() };
            let call = WriteCall::SetAttrOpen { file: self.number, set };
            let sent = files.calls.change(CallTarget::Process(home), &call, RequestContext::of(&root), deadline)?;
            settle_answer(sent.answer).and_then(attr_of)?;
        }
        if let Some(set) = self.bytes.unpublished.begin_restoring_attrs() {
            let call = WriteCall::SetAttrOpen { file: self.number, set };
            let sent = files.calls.change(CallTarget::Process(home), &call, RequestContext::of(&root), deadline)?;
            settle_answer(sent.answer).and_then(attr_of)?;
        }
        let bytes = self.bytes.list.lock().resend_all(&files.client.stats);
        if bytes > 0 {
            tracing::info!("{bytes} bytes of {} are sent again, to another node", self.logged_path());
        }
        Ok(())
    }

    /// A process before has opened the file, and may have changed it: this one does not know the number of its pending version.
    pub fn begin_adoption(&self) {
        self.end_earlier_bytes();
        self.bytes.unpublished.hold_place().number = UNKNOWN_VERSION;
    }

    /// The file has attributes now: of the process that has its changes, unless that is gone and another one has opened the file.
    pub fn end_adoption(&self, is_removed: bool) {
        let unpublished = &self.bytes.unpublished;
        if is_removed {
            unpublished.note_removed();
        }
        if !self.writes() {
            return;
        }
        if unpublished.hold_place().number == UNKNOWN_VERSION {
            unpublished.note_change();
            unpublished.note_incomplete();
        } else {
            let why = "the node of the file and the process of this mount ended at the same time; changes that were not published are lost";
            unpublished.fail(Error::new(ErrorKind::Io(EIO), why));
        }
    }

    /// The identity now.
    pub fn identity(&self) -> Option<FileIdentity> {
        let FilePlace { identity, .. } = *self.place.lock();
        identity
    }
}

fn lost_changes(lost: &HomeProcess) -> Error {
    let why = format!(
        "node {} was lost with changes that this mount had no memory to keep, and nothing of them is published: write the file again; \
         a larger --buffer-size keeps more",
        lost.node
    );
    Error::new(ErrorKind::Io(EIO), why)
}
