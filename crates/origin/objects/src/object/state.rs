//! The state of an open file of a bucket: whether there are bytes to publish, and which calls are refused. Knows no byte, no request and no lock.
//! A publication under way is no state: the changes are locked until the end of all its requests.
//!
//! | event | in `Clean` | in `Changed` | in `Lost` | in `Conflict` | in `Dropped` | in `Removed` |
//! |---|---|---|---|---|---|---|
//! | `Written` | Changed | Changed | Lost | Conflict | Dropped | Removed |
//! | `WriteLost` | Lost | Lost | Lost | Conflict | Dropped | Removed |
//! | `Cut` before the lost bytes | Changed | Changed | Changed | Conflict | Dropped | Removed |
//! | `Cut` behind | Changed | Changed | Lost | Conflict | Dropped | Removed |
//! | `Published` | Clean | Clean | Lost | Conflict | Dropped | Removed |
//! | `ConflictFound` | Conflict | Conflict | Conflict | Conflict | Dropped | Removed |
//! | `LockLost` | Dropped | Dropped | Dropped | Dropped | Dropped | Removed |
//! | `NameRemoved` | Removed | Removed | Removed | Removed | Removed | Removed |
//!
//! | the state decides | `Clean` | `Changed` | `Lost` | `Conflict` | `Dropped` | `Removed` |
//! |---|---|---|---|---|---|---|
//! | a write | goes on | goes on | goes on | fails | fails | goes on |
//! | a read | goes on | goes on | goes on | goes on | fails | goes on |
//! | a sync, or a close, sends | attributes | bytes | fails | fails | fails | nothing |
//! | the name leads to the file | yes | yes | yes | no | no | no |
//!
//! Attributes are sent if these differ from those of the object. A file that is dropped without changes sends nothing. A removed file
//! refuses what was refused before the removal, and after a lost lock what `Dropped` refuses.

use spurline_types::{Error, ErrorKind, Result};

/// What programs read about a file whose lock was lost.
pub(super) const CHANGES_DROPPED: &str =
    "the lock of this file was lost with a node, and the changes under it are not published: open the file again";

/// A write that the local disk had no space for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LostWrite {
    pub offset: u64,
    /// The bytes; 0 if a process before has tried the write.
    pub len: u64,
    pub error: Error,
}

/// The state of an open file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum ObjectState {
    /// The object has the bytes of the file.
    #[default]
    Clean,
    /// There are bytes to publish.
    Changed,
    /// Bytes of a program are missing: nothing is published until the file is cut off before.
    Lost(LostWrite),
    /// Another writer has changed the object; every later call that publishes fails with this.
    Conflict(Error),
    /// A lock was lost: the other mount may have read the object, and the changes are dropped.
    Dropped { had_changes: bool },
    /// Removed or replaced by this process, or discarded: nothing is published any more.
    Removed { refusal: Option<Error> },
}

/// What happens to an open file.
#[derive(Debug, Clone)]
pub(super) enum ObjectEvent {
    Written,
    WriteLost(LostWrite),
    /// The file has this length now.
    Cut(u64),
    /// The object has the bytes of the file, or the file goes over to that of another mount.
    Published,
    ConflictFound(Error),
    /// A lock was lost while there was something to publish, or a write was refused for that.
    LockLost,
    NameRemoved,
}

/// What a sync or a close sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Publication {
    Nothing,
    Attributes,
    Bytes,
}

impl ObjectState {
    /// The first table.
    pub fn after(self, event: ObjectEvent) -> ObjectState {
        use ObjectEvent::{ConflictFound, Cut, LockLost, NameRemoved, Published, WriteLost, Written};
        use ObjectState::{Changed, Clean, Conflict, Dropped, Lost, Removed};
        match (self, event) {
            (Clean, Written | Cut(_)) => Changed,
            (Lost(lost), Cut(len)) if len <= lost.offset => Changed,
            // The lock was lost during the call, or during the publication.
            (Dropped { .. }, Written | Cut(_)) => Dropped { had_changes: true },
            (Dropped { .. }, Published) => Dropped { had_changes: false },
            (Clean | Changed, WriteLost(lost)) => Lost(lost),
            (Changed, Published) => Clean,
            (Clean | Changed | Lost(_), ConflictFound(conflict)) => Conflict(conflict),
            (Clean, LockLost) => Dropped { had_changes: false },
            (Changed | Lost(_) | Conflict(_), LockLost) => Dropped { had_changes: true },
            (Removed { .. }, LockLost) => Removed { refusal: Some(dropped_error()) },
            (state, NameRemoved) => Removed { refusal: state.check_write().err() },
            (state, _) => state,
        }
    }

    /// Whether the bytes of the file are those of the object.
    pub fn is_clean(&self) -> bool {
        matches!(self, ObjectState::Clean | ObjectState::Dropped { had_changes: false })
    }

    /// Whether the name leads to bytes that are not published.
    pub fn is_changed(&self) -> bool {
        matches!(self, ObjectState::Changed | ObjectState::Lost(_))
    }

    /// Whether the name still leads to the file.
    pub fn is_current(&self) -> bool {
        matches!(self, ObjectState::Clean | ObjectState::Changed | ObjectState::Lost(_))
    }

    /// Fails after a lost lock.
    pub fn check_read(&self) -> Result<()> {
        match self {
            ObjectState::Dropped { .. } => Err(dropped_error()),
            ObjectState::Removed { refusal: Some(refusal) } if *refusal == dropped_error() => Err(dropped_error()),
            _ => Ok(()),
        }
    }

    /// Fails after a lost lock and after a conflict.
    pub fn check_write(&self) -> Result<()> {
        match self {
            ObjectState::Conflict(refusal) | ObjectState::Removed { refusal: Some(refusal) } => Err(refusal.clone()),
            _ => self.check_read(),
        }
    }

    /// What a sync or a close has to send, of a file whose attributes differ from those of the object or not.
    ///
    /// # Errors
    /// Why the changes will not be published.
    pub fn publication(&self, attrs_differ: bool) -> Result<Publication> {
        match self {
            ObjectState::Removed { .. } => Ok(Publication::Nothing),
            state if state.is_clean() && !attrs_differ => Ok(Publication::Nothing),
            ObjectState::Clean => Ok(Publication::Attributes),
            ObjectState::Changed => Ok(Publication::Bytes),
            ObjectState::Lost(lost) => Err(lost.error.clone()),
            ObjectState::Conflict(conflict) => Err(conflict.clone()),
            ObjectState::Dropped { .. } => Err(dropped_error()),
        }
    }
}

/// The failure of a file whose lock was lost.
pub(super) fn dropped_error() -> Error {
    Error::new(ErrorKind::Io(libc::EIO), CHANGES_DROPPED)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOST_AT: u64 = 8;

    fn lost_write() -> LostWrite {
        LostWrite { offset: LOST_AT, len: 1, error: Error::new(ErrorKind::NoSpace, "the disk is full") }
    }

    fn conflict() -> Error {
        Error::new(ErrorKind::Stale, "another writer has changed the object")
    }

    /// In the order of the columns.
    fn states() -> [ObjectState; 6] {
        [
            ObjectState::Clean,
            ObjectState::Changed,
            ObjectState::Lost(lost_write()),
            ObjectState::Conflict(conflict()),
            ObjectState::Dropped { had_changes: true },
            ObjectState::Removed { refusal: None },
        ]
    }

    /// In the order of the rows.
    fn events() -> [ObjectEvent; 8] {
        [
            ObjectEvent::Written,
            ObjectEvent::WriteLost(lost_write()),
            ObjectEvent::Cut(LOST_AT),
            ObjectEvent::Cut(LOST_AT + 1),
            ObjectEvent::Published,
            ObjectEvent::ConflictFound(conflict()),
            ObjectEvent::LockLost,
            ObjectEvent::NameRemoved,
        ]
    }

    /// The first word of the debug form.
    fn name_of(value: &dyn std::fmt::Debug) -> String {
        let text = format!("{value:?}");
        text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap().to_owned()
    }

    fn outcome_of(checked: &Result<()>) -> &'static str {
        if checked.is_ok() { "goes on" } else { "fails" }
    }

    /// The lines of a table at the head of this file, each with its cells.
    fn table(number: usize) -> Vec<Vec<&'static str>> {
        let head = include_str!("state.rs").split("\nuse ").next().unwrap();
        let table = head.split("//!\n").filter(|part| part.starts_with("//! |")).nth(number).unwrap();
        let lines = table.lines().filter(|line| !line.contains("---"));
        lines.map(|line| line.trim_matches(['/', '!', ' ', '|']).split('|').map(str::trim).collect()).collect()
    }

    #[test]
    fn the_transitions_are_those_of_the_table() {
        let table = table(0);
        assert_eq!(table.len(), 1 + events().len());
        for (cells, event) in table[1..].iter().zip(events()) {
            assert!(cells[0].starts_with(&format!("`{}`", name_of(&event))), "{event:?} in {cells:?}");
            assert_eq!(cells.len(), 1 + states().len());
            for (column, state) in (1..).zip(states()) {
                assert_eq!(table[0][column], format!("in `{}`", name_of(&state)));
                let cell = format!("{event:?} in {state:?}");
                assert_eq!(name_of(&state.after(event.clone())), cells[column], "{cell}");
            }
        }
    }

    #[test]
    fn the_decisions_are_those_of_the_table() {
        let table = table(1);
        for (column, state) in (1..).zip(states()) {
            let sent = state.publication(true).map_or("fails".to_owned(), |sent| name_of(&sent).to_lowercase());
            let name = format!("`{}`", name_of(&state));
            let decisions = [
                name.as_str(),
                outcome_of(&state.check_write()),
                outcome_of(&state.check_read()),
                sent.as_str(),
                if state.is_current() { "yes" } else { "no" },
            ];
            assert!(table.iter().map(|cells| cells[column]).eq(decisions), "{decisions:?}");
        }
    }

    #[test]
    fn a_file_whose_lock_was_lost_fails_until_its_end() {
        let refused = ObjectState::Clean.after(ObjectEvent::LockLost);
        assert_eq!(refused.publication(false), Ok(Publication::Nothing));
        assert_eq!(refused.publication(true), Err(dropped_error()));
        let written = refused.after(ObjectEvent::Written);
        assert_eq!(written.publication(false), Err(dropped_error()));
        let published = written.after(ObjectEvent::Published);
        assert_eq!(published.publication(false), Ok(Publication::Nothing));
        let removed = published.after(ObjectEvent::NameRemoved);
        assert_eq!(removed.check_read(), Err(dropped_error()));
        assert_eq!(removed.check_write(), Err(dropped_error()));
        assert_eq!(ObjectState::Removed { refusal: None }.after(ObjectEvent::LockLost), removed);
    }

    #[test]
    fn a_file_with_a_conflict_takes_no_writes_after_the_removal() {
        let removed = ObjectState::Conflict(conflict()).after(ObjectEvent::NameRemoved);
        assert_eq!(removed.check_read(), Ok(()));
        assert_eq!(removed.check_write(), Err(conflict()));
        assert_eq!(removed.publication(true), Ok(Publication::Nothing));
    }
}
