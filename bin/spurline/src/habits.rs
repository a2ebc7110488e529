//! Flags of JuiceFS and Alluxio that users paste: what does the same here, or why it is not needed. It parses nothing.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use spurline_config::Fault;

/// Flags of other systems' mount commands, with the remedy. Flags with the same name here are not among them.
const FOREIGN_FLAGS: [(&str, &str); 27] = [
    ("--group-weight", "--weight N of 'spurline node' is a node's share of the blocks; 0 takes none"),
    ("--group-backup", "--replicas N keeps each file on N nodes"),
    ("--cache-replica", "--replicas N keeps each file on N nodes"),
    ("--fill-group-cache", "blocks enter the cache when they are read; 'spurline load PATH' fetches them before"),
    ("--cache-partial-only", "a read fetches whole blocks; --block-size 1M suits small random reads"),
    ("--cache-full-block", "whole blocks are always cached"),
    ("--cache-large-write", "leave it out"),
    ("--cache-eviction", "the eviction policy is fixed (S3-FIFO); 'spurline pin PATH' keeps a folder cached"),
    ("--cache-expire", "'spurline limit PATH --ttl TIME' evicts a folder's blocks after a time"),
    ("--cache-items", "--cache-size limits the bytes; the number of blocks has no limit of its own"),
    ("--cache-scan-interval", "leave it out: the index of a cache disk is kept in a log and not scanned"),
    ("--cache-mode", "leave it out: cache files belong to the user that mounts"),
    ("--cache-checksum", "leave it out: every block is verified by its checksum"),
    ("--verify-cache-checksum", "leave it out: every block is verified by its checksum"),
    ("--prefetch", "--max-readahead SIZE limits the read-ahead of sequential readers"),
    ("--initial-readahead", "--max-readahead SIZE limits the read-ahead of sequential readers"),
    ("--attrcacheto", "--attr-cache TIME"),
    ("--entrycacheto", "--entry-cache TIME"),
    ("--direntrycacheto", "--dir-entry-cache TIME"),
    ("--opencache", "leave it out: an open file is bound to one version"),
    ("--open-cache", "leave it out: an open file is bound to one version"),
    ("--get-timeout", "--origin-timeout TIME is the deadline of one read, retries included"),
    ("--io-retries", "--origin-timeout TIME: retries go on until then"),
    ("--download-limit", "--max-downloads N limits concurrent reads; 'spurline load --rate SIZE' limits a job"),
    ("--update-fstab", "write the line yourself: SOURCE MOUNTPOINT spurline _netdev,ro 0 0"),
    ("--bucket", "the bucket is the source: spurline mount s3://BUCKET MOUNTPOINT [--endpoint-url URL]"),
    ("--no-usage-report", "leave it out: nothing is reported"),
];

/// If clap refused a flag of another system, an error with what does the same here.
pub fn explain_foreign_flag(error: &clap::Error) -> Option<Fault> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let (_, remedy) = FOREIGN_FLAGS.iter().find(|(name, _)| name == flag)?;
    Some(Fault::usage(format!("{flag} is a flag of another file system"), *remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_flags_are_no_flags_of_ours_and_their_remedies_name_real_ones() {
        let command = crate::cli::cli_command();
        let ours: Vec<String> = command
            .get_subcommands()
            .flat_map(|sub| sub.get_arguments())
            .filter_map(|arg| Some(format!("--{}", arg.get_long()?)))
            .collect();
        for (flag, remedy) in FOREIGN_FLAGS {
            assert!(!ours.iter().any(|own| own == flag), "{flag} exists here");
            for word in remedy.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')) {
                let named = word.starts_with("--");
                assert!(!named || ours.iter().any(|own| own == word), "{flag}: {word} does not exist");
            }
        }
    }
}
