//! Flags and commands of JuiceFS and Alluxio that users paste: what does the same here, or why there is none. It parses nothing.

use crate::config_file::SERVICES;
use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use spurline_config::Fault;

/// Flags of other systems' mount commands, with the remedy. Flags with the same name here are not among them.
const FOREIGN_FLAGS: [(&str, &str); 45] = [
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
    ("--writeback", WRITES),
    ("--upload-delay", WRITES),
    ("--upload-hours", WRITES),
    ("--upload-limit", WRITES),
    ("--max-uploads", WRITES),
    ("--put-timeout", WRITES),
    ("--max-stage-write", WRITES),
    ("--max-deletes", "leave it out: no objects are deleted, buckets are only read"),
    (
        "--token",
        "--group-token-file FILE has the secret of a cache group; credentials of a bucket come from the AWS variables and files",
    ),
    ("--subdir", "name the folder in the source: spurline mount s3://BUCKET/FOLDER MOUNTPOINT, or /DIRECTORY/FOLDER"),
    ("--backup-meta", METADATA),
    ("--backup-skip-trash", METADATA),
    ("--no-bgjob", METADATA),
    (
        "--heartbeat",
        "leave it out: members report to the registry; --member-hold TIME keeps the share of one that left",
    ),
    ("--root-squash", "--squash UID:GID makes the changes of all users as one; there is none for root alone"),
    ("--all-squash", "--squash UID:GID"),
    ("--path", "paths are words without a flag: spurline load PATH"),
    ("--file", "--files-from FILE of 'spurline load'"),
];

const WRITES: &str = "leave it out: buckets are only read, and --rw changes a directory itself (through nodes at an fsync, a close, \
                      or after a second); nothing is uploaded later";
const METADATA: &str = "leave it out: there is no metadata engine; names and attributes are those of the source";

/// Commands of other systems, with the remedy.
const FOREIGN_COMMANDS: [(&str, &str); 21] = [
    ("warmup", "'spurline load PATH' fetches files before they are read, 'spurline free PATH' drops them"),
    (
        "job",
        "'spurline load PATH' loads; the same with --progress or --stop shows or ends the job. 'spurline free PATH' drops files",
    ),
    (
        "fs",
        "files are in the mount, for ls, cat and cp; 'spurline load PATH', 'spurline free PATH' and 'spurline info PATH' are for the cache",
    ),
    (
        "doctor",
        "'spurline net doctor' checks network and RDMA; 'spurline status' and 'spurline stats MOUNTPOINT' show mounts and nodes",
    ),
    ("format", MOUNTED_AS_IT_IS),
    ("auth", MOUNTED_AS_IT_IS),
    ("init", MOUNTED_AS_IT_IS),
    ("process", "'spurline node' runs a cache node, 'spurline coordinator' keeps their list"),
    ("gc", STAYS_AS_IT_IS),
    ("fsck", STAYS_AS_IT_IS),
    ("compact", STAYS_AS_IT_IS),
    ("dump", STAYS_AS_IT_IS),
    ("gateway", NFS_ONLY),
    ("webdav", NFS_ONLY),
    ("sync", "there is none: cp and rsync copy through a mount, the bucket's own tools beside it"),
    (
        "quota",
        "'spurline limit PATH --quota SIZE' limits a folder's space in the caches; quotas of files are the source's",
    ),
    (
        "profile",
        "'spurline stats MOUNTPOINT' shows counters; --access-log FILE of 'spurline mount' writes each request",
    ),
    ("objbench", "'spurline bench suite' measures reads of objects in its section s3"),
    ("mdtest", "'spurline bench suite' measures small files in its section files"),
    ("rmr", "rm -r, in a mount with --rw"),
    ("summary", "du -s, in the mount"),
];

const MOUNTED_AS_IT_IS: &str =
    "leave it out: 'spurline mount SOURCE MOUNTPOINT' mounts a bucket or a directory as it is";
const STAYS_AS_IT_IS: &str = "leave it out: there is no metadata engine; files and objects are whole in the source";
const NFS_ONLY: &str = "there is none; 'spurline export MOUNTPOINT' serves a mount to NFS clients";

/// If clap refused a flag or a command of another system, or a flag that only another service of `command` has: an error with
/// what to do here.
pub fn explain_foreign_word(command: &Command, error: &clap::Error) -> Option<Fault> {
    let word = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let remedy_of =
        |known: &[(&str, &'static str)], word: &str| known.iter().find(|(name, _)| *name == word).map(|of| of.1);
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let flag = word(ContextKind::InvalidArg)?;
            match remedy_of(&FOREIGN_FLAGS, flag) {
                Some(remedy) => Some(Fault::usage(format!("{flag} is a flag of another file system"), remedy)),
                None => explain_flag_of_one_service(command, flag),
            }
        }
        ErrorKind::InvalidSubcommand => {
            let name = word(ContextKind::InvalidSubcommand)?;
            let remedy = remedy_of(&FOREIGN_COMMANDS, name)?;
            Some(Fault::usage(format!("{name} is a command of another file system"), remedy))
        }
        _ => None,
    }
}

/// A flag that one service has and the command that was called has not.
fn explain_flag_of_one_service(command: &Command, flag: &str) -> Option<Fault> {
    let has =
        |sub: &Command| sub.get_arguments().any(|arg| arg.get_long().is_some_and(|long| flag == format!("--{long}")));
    let all: Vec<&str> = command.get_subcommands().filter(|sub| has(sub)).map(Command::get_name).collect();
    match all[..] {
        [only] if SERVICES.contains(&only) => Some(Fault::usage(
            format!("{flag} is a flag of 'spurline {only}'"),
            format!("give it to that command, which 'spurline {only} --help' describes"),
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words after `'spurline ` in a remedy that are no command.
    fn unknown_commands(remedy: &str, command: &Command) -> Vec<String> {
        let named = remedy.split("'spurline ").skip(1).filter_map(|rest| rest.split([' ', '\'']).next());
        named.filter(|name| command.find_subcommand(name).is_none()).map(str::to_owned).collect()
    }

    #[test]
    fn foreign_words_are_not_ours_and_their_remedies_name_real_ones() {
        let command = crate::cli::cli_command();
        for (name, _) in FOREIGN_COMMANDS {
            assert!(command.find_subcommand(name).is_none(), "{name} exists here");
        }
        let ours: Vec<String> = command
            .get_subcommands()
            .flat_map(|sub| sub.get_arguments())
            .filter_map(|arg| Some(format!("--{}", arg.get_long()?)))
            .collect();
        for (word, remedy) in FOREIGN_FLAGS.into_iter().chain(FOREIGN_COMMANDS) {
            assert!(!ours.iter().any(|own| own == word), "{word} exists here");
            assert_eq!(unknown_commands(remedy, &command), [""; 0], "{word}");
            for part in remedy.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')) {
                let named = part.starts_with("--");
                assert!(!named || ours.iter().any(|own| own == part), "{word}: {part} does not exist");
            }
        }
    }
}
