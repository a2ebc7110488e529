//! Written bytes that reach the source after the calls of programs have returned, and those that never did, for those who did not
//! read the log of their mount. It knows no reason and no remedy.

const NAMED_FILES: usize = 5;

/// The side of a mount that has written bytes which are not in the source yet.
pub trait DelayedWrites: Send + Sync {
    /// Whether the bytes wait for their publication, rather than for a node.
    fn publishes(&self) -> bool;

    /// Files with such bytes, and the numbers of bytes: they are lost if this process ends.
    fn unsent_files(&self) -> Vec<(String, u64)>;

    /// The losses until now.
    fn losses(&self) -> WriteLosses;

    /// Waits until the files that were closed have ended.
    fn finish_closing(&self) {}

    /// The mount has ended: makes all that was changed through it durable.
    fn finish_durably(&self) {}

    /// Whether [`DelayedWrites::finish_durably`] is under way.
    fn is_finishing(&self) -> bool {
        false
    }
}

/// Losses of a mount whose programs had gone on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WriteLosses {
    /// Written bytes that no node took, or that the source did not take, before their file was closed for good.
    pub bytes: u64,
    /// The files of these bytes.
    pub file_count: u64,
    /// The first of the files, with the lost bytes of each.
    pub first_files: Vec<(String, u64)>,
    /// Why the source made changes not durable at the end of the mount.
    pub not_durable: Option<String>,
    /// Why the mount does not know at its end whether all changes are durable: a node was lost, and its host may still write them.
    pub maybe_not_durable: Option<String>,
}

impl WriteLosses {
    /// Adds lost bytes of the file that is shown as `path`.
    pub fn add_file(&mut self, path: String, bytes: u64) {
        self.bytes += bytes;
        if let Some((_, known)) = self.first_files.iter_mut().find(|(known, _)| *known == path) {
            *known += bytes;
            return;
        }
        self.file_count += 1;
        if self.first_files.len() < NAMED_FILES {
            self.first_files.push((path, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_files_are_named_and_all_bytes_counted() {
        let mut losses = WriteLosses::default();
        for n in 0..7 {
            losses.add_file(format!("file{}", n % 6), 10);
        }
        assert_eq!((losses.bytes, losses.file_count, losses.first_files.len()), (70, 6, 5));
        assert_eq!(losses.first_files[0], ("file0".to_owned(), 20));
    }
}
