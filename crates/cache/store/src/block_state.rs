//! The states of a block in the store, and the transitions between them. Knows no index, no file and no lock.
//!
//! ```text
//!              claim              enter             logged            verify
//!   Absent ──────────▶ Writing ──────────▶ Logging ──────────▶ Stored ────────▶ Verified
//!     ▲ ▲                 │                   │ remove           │ remove          │ remove
//!     │ └─── failed ──────┘                   ▼      writer ends ▼                 │
//!     │                                    Revoked ──────────▶ Leaving ◀───────────┘
//!     └──────────────────────── forgotten ────────────────────────┘
//! ```

/// The state of a block in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub enum BlockState {
    /// Not in the store.
    Absent,
    /// Claimed by a writer; not in the index yet.
    Writing,
    /// Readable; not yet logged by the writer.
    Logging,
    /// Readable, logged, and not verified since the store opened.
    Stored,
    /// As [`BlockState::Stored`], and every granule was read and verified since the store opened.
    Verified,
    /// Removed before the writer's record in the log: unreadable, and the writer hands the block over for removal.
    Revoked,
    /// Unreadable; to be removed from disk.
    Leaving,
}

impl BlockState {
    /// The transition table: whether a block in this state may enter `next`.
    pub fn may_become(self, next: BlockState) -> bool {
        use BlockState::{Absent, Leaving, Logging, Revoked, Stored, Verified, Writing};
        match (self, next) {
            // A writer claims the block, fails before the entry in the index, or enters the block.
            (Absent, Writing) | (Writing, Absent | Logging)
            // The writer has logged the block.
            | (Logging, Stored)
            // The log names the block at start, perhaps twice.
            | (Absent | Stored, Stored)
            | (Stored, Verified)
            // Evicted, expired, dropped or removed: while the writer logs the block, only the writer may pass the block on.
            | (Logging, Revoked)
            | (Revoked | Stored | Verified, Leaving)
            // The space was freed; or the disk is unusable, and another takes the block; or the log removes the block at start.
            | (Leaving | Stored | Verified, Absent) => true,
            _ => false,
        }
    }

    /// Whether readers may use the block.
    pub fn is_readable(self) -> bool {
        matches!(self, BlockState::Logging | BlockState::Stored | BlockState::Verified)
    }

    /// Whether a writer owns the block.
    pub fn is_being_written(self) -> bool {
        matches!(self, BlockState::Writing | BlockState::Logging | BlockState::Revoked)
    }
}

#[cfg(test)]
mod tests {
    use super::BlockState::{self, Absent, Leaving, Logging, Revoked, Stored, Verified, Writing};

    const ALL: [BlockState; 7] = [Absent, Writing, Logging, Stored, Verified, Revoked, Leaving];

    #[test]
    fn the_table_is_what_the_diagram_shows() {
        let next = |state: BlockState| ALL.into_iter().filter(|next| state.may_become(*next)).collect::<Vec<_>>();
        assert_eq!(next(Absent), [Writing, Stored]);
        assert_eq!(next(Writing), [Absent, Logging]);
        assert_eq!(next(Logging), [Stored, Revoked]);
        assert_eq!(next(Stored), [Absent, Stored, Verified, Leaving]);
        assert_eq!(next(Verified), [Absent, Leaving]);
        assert_eq!(next(Revoked), [Leaving]);
        assert_eq!(next(Leaving), [Absent]);
    }

    #[test]
    fn an_unreadable_block_becomes_readable_only_by_a_writer_or_the_log() {
        for state in ALL {
            for next in ALL.into_iter().filter(|next| state.may_become(*next)) {
                let by_writer = (state, next) == (Writing, Logging);
                let by_log = (state, next) == (Absent, Stored);
                assert!(state.is_readable() || !next.is_readable() || by_writer || by_log, "{state:?} to {next:?}");
                // A block that a writer still owns never disappears: the record would be logged after the removal.
                assert!(!(state.is_being_written() && state != Writing && next == Absent), "{state:?}");
            }
        }
    }
}
