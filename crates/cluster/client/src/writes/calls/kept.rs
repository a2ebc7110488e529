//! A client that outlives its process: the changes of programs go on under their numbers, and open files at their processes. It
//! knows no request.

use super::{ChangeNumber, HomeProcess, MaybeExecuted, WriteCalls};
use spurline_types::ObjectId;
use spurline_volume::kept_client::{HeldFile, SentChange};
use spurline_volume::writes::FileIdentity;
use std::sync::Arc;

/// The number of an append, and where the bytes are expected to go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DrawnAppend {
    pub number: u64,
    pub place: u64,
    /// The processes that may have executed it.
    pub before: MaybeExecuted,
}

/// A hash of a node's name, as [`HeldFile::node`] has it.
pub(crate) fn node_hash(name: &str) -> u64 {
    ObjectId::from_text(name, b"", "").0 as u64
}

impl MaybeExecuted {
    /// As [`SentChange::process`] has it.
    pub(super) fn of_kept(process: u64) -> MaybeExecuted {
        match process {
            0 => MaybeExecuted::Nowhere,
            u64::MAX => MaybeExecuted::Anywhere,
            process => MaybeExecuted::At(process),
        }
    }

    pub(super) fn to_kept(self) -> u64 {
        match self {
            MaybeExecuted::Nowhere => 0,
            MaybeExecuted::At(process) => process,
            MaybeExecuted::Anywhere => u64::MAX,
        }
    }
}

impl WriteCalls {
    /// Whether this client outlives its process.
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Whether earlier processes were the same client.
    pub fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// The number of the change that a program requests: that of the process before, if that has sent the change. A file that is
    /// opened by the change has the same number.
    pub fn draw_for_request(&self) -> ChangeNumber<'_> {
        self.draw_for_names([None; 2])
    }

    /// As [`WriteCalls::draw_for_request`], for a change of names that lead to the `known` objects.
    pub fn draw_for_names(&self, known: [Option<FileIdentity>; 2]) -> ChangeNumber<'_> {
        let repeated = self.kept.as_ref().and_then(|kept| kept.take_repeated());
        let number = match repeated {
            Some(sent) => self.numbers.take_up(&sent),
            None => self.numbers.draw_for_names(known),
        };
        if let Some(kept) = &self.kept {
            kept.note_sending(&number.to_kept());
        }
        number
    }

    /// As [`WriteCalls::draw_for_request`], for bytes that `home` appends at `place`, until [`WriteCalls::end_number`]; `None` if
    /// this client does not outlive its process. Any thread may send the bytes, so the record names their process before that.
    pub fn draw_for_append(&self, place: u64, home: &HomeProcess) -> Option<DrawnAppend> {
        let kept = self.kept.as_ref()?;
        let repeated = kept.take_repeated();
        let drawn = match repeated {
            Some(sent) => {
                let before = MaybeExecuted::of_kept(sent.process);
                DrawnAppend { number: sent.number, place: sent.place, before }
            }
            None => {
                let number = self.numbers.draw_raw();
                DrawnAppend { number, place, before: MaybeExecuted::Nowhere }
            }
        };
        let DrawnAppend { number, place, before, .. } = drawn;
        let maybe_executed = match before {
            MaybeExecuted::Nowhere => MaybeExecuted::At(home.instance),
            before => before,
        };
        kept.note_sending(&SentChange { number, process: maybe_executed.to_kept(), place, known: [None; 2] });
        Some(drawn)
    }

    /// The node of an open file is another one.
    pub fn note_held(&self, record: u32, held: &HeldFile) {
        if let Some(kept) = &self.kept {
            kept.note_held(record, held);
        }
    }

    /// The process that has a file open for an earlier process.
    pub fn find_process(&self, held: &HeldFile) -> HomeProcess {
        let view = self.client.members().snapshot();
        let member = view.members().iter().find(|member| node_hash(&member.name) == held.node);
        // A node that left the group has lost its files.
        let node = member.map_or_else(|| Arc::from("?"), |member| Arc::from(&*member.name));
        HomeProcess { node, instance: held.process }
    }
}
