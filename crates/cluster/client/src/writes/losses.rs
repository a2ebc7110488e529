//! The losses of a mount, for those who did not read its log. It knows no reason and no remedy.

/// The most files that are named.
const NAMED_FILES: usize = 5;

/// Losses of a mount whose programs had gone on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WriteLosses {
    /// Written bytes that no node took before their file was closed for good.
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
    pub(super) fn add_file(&mut self, path: String, bytes: u64) {
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
