//! Flags, mount options and commands of other file systems that users paste (JuiceFS, Alluxio, mountpoint-s3, rclone, s3fs,
//! goofys, gcsfuse, NFS): the equivalent here, or why there is none. Parses nothing.

use crate::args::MountArgs;
use crate::config_file::SERVICE_COMMANDS;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args as _, Command};
use spurline_config::values::nearest_word;
use spurline_config::{Fault, MOUNT_OPTIONS, fuse};
use spurline_types::{LABEL_OPTIONS, split_option_list};
use std::ffi::OsString;

/// Words of other systems without dashes, with the remedy in the form of flags. Words with the same name here are left out.
const FOREIGN_WORDS: &[(&str, &str)] = &[
    // JuiceFS, Alluxio.
    ("group-weight", "--weight N of 'spurline node' is a node's share of the blocks; 0 takes none"),
    ("group-backup", "--replicas N keeps each file on N nodes"),
    ("cache-replica", "--replicas N keeps each file on N nodes"),
    ("fill-group-cache", "blocks enter the cache when they are read; 'spurline load PATH' fetches them before"),
    ("cache-partial-only", "a read fetches whole blocks; --block-size 1M suits small random reads"),
    ("cache-full-block", "whole blocks are always cached"),
    ("cache-large-write", "leave it out: a file of a bucket that was just written is read without a request"),
    ("cache-eviction", "the eviction policy is fixed (S3-FIFO); 'spurline pin PATH' keeps a folder cached"),
    ("cache-expire", "'spurline limit PATH --ttl TIME' evicts a folder's blocks after a time"),
    ("cache-items", "--cache-size limits the bytes; the number of blocks has no limit of its own"),
    ("cache-scan-interval", "leave it out: the index of a cache disk is kept in a log and not scanned"),
    ("cache-mode", "leave it out: cache files belong to the user that mounts"),
    ("cache-checksum", "leave it out: every block is verified by its checksum"),
    ("verify-cache-checksum", "leave it out: every block is verified by its checksum"),
    ("prefetch", "--max-readahead SIZE limits the read-ahead of sequential readers"),
    ("initial-readahead", "--max-readahead SIZE limits the read-ahead of sequential readers"),
    ("attrcacheto", "--attr-cache TIME"),
    ("entrycacheto", "--entry-cache TIME"),
    ("direntrycacheto", "--dir-entry-cache TIME"),
    ("opencache", "leave it out: an open file is bound to one version"),
    ("open-cache", "leave it out: an open file is bound to one version"),
    ("get-timeout", "--origin-timeout TIME is the deadline of one read, retries included"),
    ("io-retries", "--origin-timeout TIME: retries go on until then"),
    ("download-limit", "--max-downloads N limits concurrent reads; 'spurline load --rate SIZE' limits a job"),
    ("update-fstab", "write the line yourself: SOURCE MOUNTPOINT spurline _netdev,ro 0 0"),
    ("bucket", "the bucket is the source: spurline mount s3://BUCKET MOUNTPOINT [--endpoint-url URL]"),
    ("no-usage-report", "leave it out: nothing is reported"),
    ("writeback", WRITE_ADVICE),
    ("upload-delay", WRITE_ADVICE),
    ("upload-hours", WRITE_ADVICE),
    ("upload-limit", "there is none: uploads are as fast as the bucket takes them"),
    ("max-uploads", UPLOADS_ITSELF),
    ("put-timeout", "--origin-timeout TIME is the deadline of an upload, with a second more for each MiB"),
    ("max-stage-write", UPLOADS_ITSELF),
    ("max-deletes", "leave it out: with --rw each removal is a request of its own, made before the call returns"),
    (
        "token",
        "--group-token-file FILE has the secret of a cache group; credentials of a bucket come from the AWS variables and files",
    ),
    ("subdir", "name the folder in the source: spurline mount s3://BUCKET/FOLDER MOUNTPOINT, or /DIRECTORY/FOLDER"),
    ("backup-meta", METADATA_ADVICE),
    ("backup-skip-trash", METADATA_ADVICE),
    ("no-bgjob", METADATA_ADVICE),
    ("heartbeat", "leave it out: members report to the registry; --member-hold TIME keeps the share of one that left"),
    ("root-squash", "--squash UID:GID makes the changes of all users as one; there is none for root alone"),
    ("all-squash", "--squash UID:GID"),
    ("path", "paths are words without a flag: spurline load PATH"),
    ("file", "--files-from FILE of 'spurline load'"),
    // mountpoint-s3.
    (
        "profile",
        "set the variable AWS_PROFILE=NAME for the process that uses the bucket; without it the profile 'default' is used",
    ),
    ("prefix", IN_THE_SOURCE),
    ("cache", "--cache-dir DIR"),
    ("max-cache-size", "--cache-size SIZE, with a unit: 100G"),
    ("metadata-ttl", NAME_TIMES),
    ("negative-metadata-ttl", NAME_TIMES),
    ("max-threads", "--fuse-threads N"),
    ("read-part-size", "--block-size SIZE is the unit of fetches"),
    ("part-size", "--block-size SIZE is the unit of fetches"),
    ("maximum-throughput-gbps", "leave it out: --max-downloads N limits concurrent reads"),
    ("log-directory", "--log FILE"),
    ("debug", "--log-filter=debug"),
    ("debug-crt", "--log-filter=debug"),
    ("no-log", "--log-filter=off"),
    ("log-metrics", "--metrics ADDR serves the metrics, 'spurline stats MOUNTPOINT' shows them"),
    ("allow-delete", ALLOWED_ADVICE),
    ("allow-overwrite", ALLOWED_ADVICE),
    (
        "incremental-upload",
        "leave it out: --rw changes and appends to files of a bucket anywhere; their unchanged parts are copied within the store",
    ),
    ("write-part-size", UPLOADS_ITSELF),
    ("upload-checksums", "leave it out: every upload to S3 carries a checksum, which the store verifies"),
    ("transfer-acceleration", ENDPOINT_ADVICE),
    ("dual-stack", ENDPOINT_ADVICE),
    ("bucket-type", ENDPOINT_ADVICE),
    ("force-path-style", URL_STYLE),
    ("bind", "leave it out: the routes of the host choose the interface to the origin"),
    // rclone.
    ("allow-non-empty", "-o nonempty"),
    ("option", "-o OPTION"),
    ("fuse-flag", "-o OPTION"),
    ("daemon", "--background (-d)"),
    ("daemon-wait", "leave it out: --background (-d) returns when the mount is ready"),
    ("daemon-timeout", "leave it out: --background (-d) returns when the mount is ready"),
    ("devname", "-o fsname=NAME"),
    ("volname", "-o fsname=NAME"),
    ("attr-timeout", "--attr-cache TIME"),
    ("dir-cache-time", NAME_TIMES),
    ("poll-interval", NAME_TIMES),
    ("dir-perms", "--dir-mode MODE"),
    ("file-perms", "--file-mode MODE"),
    ("umask", MODE_ADVICE),
    ("max-read-ahead", "--kernel-readahead SIZE"),
    ("vfs-read-ahead", "--max-readahead SIZE"),
    (
        "vfs-cache-mode",
        "leave it out: blocks that are read are cached, --rw writes files anywhere, and --cache-size 0 caches nothing on disk",
    ),
    ("vfs-cache-max-size", "--cache-size SIZE"),
    ("vfs-cache-max-age", "'spurline limit PATH --ttl TIME' evicts a folder's blocks after a time"),
    ("vfs-cache-min-free-space", "--free-space-ratio RATIO"),
    ("vfs-cache-poll-interval", CACHE_ITSELF),
    ("vfs-read-chunk-size", "--block-size SIZE is the unit of fetches"),
    ("vfs-read-chunk-size-limit", "--block-size SIZE is the unit of fetches"),
    ("vfs-read-chunk-streams", "--max-downloads N limits concurrent reads"),
    ("vfs-read-wait", CACHE_ITSELF),
    ("vfs-write-wait", CACHE_ITSELF),
    ("vfs-write-back", WRITE_ADVICE),
    ("write-back-cache", "leave it out: the kernel hands each write on; through nodes the mount gathers small writes"),
    ("vfs-fast-fingerprint", "leave it out: a version is the object's etag"),
    ("vfs-refresh", "'spurline load PATH --metadata-only' loads names and attributes"),
    ("no-modtime", ATTRIBUTE_ADVICE),
    ("no-checksum", "leave it out: every block is verified by its checksum"),
    ("no-seek", CACHE_ITSELF),
    ("async-read", CACHE_ITSELF),
    ("transfers", "--max-downloads N limits concurrent reads; 'spurline load PATH -p N' those of a job"),
    ("checkers", "--max-downloads N limits concurrent reads; 'spurline load PATH -p N' those of a job"),
    ("bwlimit", RATE_ADVICE),
    ("tpslimit", RATE_ADVICE),
    ("retries", ORIGIN_TIMES),
    ("low-level-retries", ORIGIN_TIMES),
    ("contimeout", ORIGIN_TIMES),
    ("log-file", "--log FILE"),
    ("log-level", "--log-filter LEVEL"),
    ("debug-fuse", "--access-log FILE writes each request of the kernel"),
    ("s3-endpoint", "--endpoint-url URL"),
    ("s3-region", "--region NAME"),
    ("s3-provider", "leave it out: --endpoint-url URL names the server"),
    ("s3-access-key-id", ACCESS_KEY_ADVICE),
    ("s3-secret-access-key", ACCESS_KEY_ADVICE),
    ("s3-session-token", ACCESS_KEY_ADVICE),
    ("s3-env-auth", ACCESS_KEY_ADVICE),
    ("s3-profile", "set the variable AWS_PROFILE=NAME for the process that uses the bucket"),
    ("s3-force-path-style", URL_STYLE),
    ("rc", "'spurline stats MOUNTPOINT' and 'spurline status' answer about a mount"),
    ("rc-addr", "'spurline stats MOUNTPOINT' and 'spurline status' answer about a mount"),
    ("fast-list", CACHE_ITSELF),
    // s3fs.
    ("url", "--endpoint-url URL"),
    ("host", "--endpoint-url URL"),
    ("passwd-file", ACCESS_KEY_ADVICE),
    ("iam-role", "leave it out: the role of the machine is used where no other credentials are found"),
    ("use-path-request-style", URL_STYLE),
    ("use-cache", "--cache-dir DIR"),
    ("del-cache", "leave it out: cached blocks are found again by the next mount; 'spurline free PATH' drops them"),
    ("ensure-diskfree", "--free-space-ratio RATIO"),
    ("stat-cache-expire", NAME_TIMES),
    ("stat-cache-interval-expire", NAME_TIMES),
    ("max-stat-cache-size", NAME_MEMORY),
    ("enable-noobj-cache", NAME_TIMES),
    ("parallel-count", "--max-downloads N"),
    ("multireq-max", "--max-downloads N"),
    ("connect-timeout", ORIGIN_TIMES),
    ("readwrite-timeout", ORIGIN_TIMES),
    ("public-bucket", "--anonymous"),
    ("no-check-certificate", CERTIFICATE_ADVICE),
    ("ssl-verify-hostname", CERTIFICATE_ADVICE),
    ("sigv2", SIGNATURE_ADVICE),
    ("sigv4", SIGNATURE_ADVICE),
    ("dbglevel", "--log-filter=debug"),
    ("curldbg", "--log-filter=debug"),
    ("logfile", "--log FILE"),
    ("mp-umask", MODE_ADVICE),
    ("compat-dir", FOLDER_ADVICE),
    ("complement-stat", FOLDER_ADVICE),
    ("notsup-compat-dir", FOLDER_ADVICE),
    ("use-xattr", "--object-attrs keeps extended attributes, owner, mode and times with a bucket's objects"),
    ("default-acl", BUCKET_DEFAULTS),
    ("use-sse", ENCRYPTION_ADVICE),
    ("use-rrs", "--storage-class REDUCED_REDUNDANCY"),
    ("multipart-size", UPLOADS_ITSELF),
    ("nomultipart", UPLOADS_ITSELF),
    // goofys.
    ("endpoint", "--endpoint-url URL names the server, --region NAME the region"),
    ("subdomain", URL_STYLE),
    ("stat-cache-ttl", NAME_TIMES),
    ("type-cache-ttl", NAME_TIMES),
    ("http-timeout", ORIGIN_TIMES),
    ("debug-s3", "--log-filter=debug"),
    ("cheap", CACHE_ITSELF),
    ("no-implicit-dir", FOLDER_ADVICE),
    ("use-content-type", "leave it out: a new object has the content type of its name"),
    ("acl", BUCKET_DEFAULTS),
    ("sse-kms", ENCRYPTION_ADVICE),
    ("sse-c", "there is none with keys of the client: --sse aws:kms --sse-kms-key-id KEY encrypts with a key of yours"),
    // gcsfuse.
    ("only-dir", IN_THE_SOURCE),
    ("implicit-dirs", FOLDER_ADVICE),
    ("key-file", "set the variable GOOGLE_APPLICATION_CREDENTIALS=FILE for the process that uses the bucket"),
    ("token-url", "set the variable GOOGLE_APPLICATION_CREDENTIALS=FILE for the process that uses the bucket"),
    ("billing-project", "there is none: requests are paid by the owner of the bucket"),
    ("anonymous-access", "--anonymous"),
    ("custom-endpoint", ENDPOINT_ADVICE),
    ("client-protocol", CACHE_ITSELF),
    ("config-file", "--config FILE, in TOML with the flags as keys"),
    ("file-cache-max-size-mb", "--cache-size SIZE, with a unit: 100G"),
    ("file-cache-cache-file-for-range-read", CACHE_ITSELF),
    ("file-cache-enable-parallel-downloads", CACHE_ITSELF),
    ("metadata-cache-ttl-secs", NAME_TIMES),
    ("metadata-cache-negative-ttl-secs", NAME_TIMES),
    ("kernel-list-cache-ttl-secs", NAME_TIMES),
    ("stat-cache-max-size-mb", NAME_MEMORY),
    ("stat-cache-capacity", NAME_MEMORY),
    ("type-cache-max-size-mb", NAME_MEMORY),
    ("max-conns-per-host", "--max-downloads N"),
    ("limit-bytes-per-sec", RATE_ADVICE),
    ("limit-ops-per-sec", RATE_ADVICE),
    ("max-retry-sleep", ORIGIN_TIMES),
    ("max-retry-duration", ORIGIN_TIMES),
    ("max-retry-attempts", ORIGIN_TIMES),
    ("http-client-timeout", ORIGIN_TIMES),
    ("sequential-read-size-mb", "--block-size SIZE is the unit of fetches"),
    ("read-ahead-kb", "--kernel-readahead SIZE"),
    ("log-severity", "--log-filter LEVEL"),
    ("prometheus-port", "--metrics ADDR"),
    ("temp-dir", "--cache-dir DIR: changed bytes of a bucket's files lie in the first one until they are published"),
    ("rename-dir-limit", "--rename-limit N"),
    (
        "enable-streaming-writes",
        "leave it out: full parts of a file are uploaded while it is written, and the object appears at the close",
    ),
    ("ignore-interrupts", CACHE_ITSELF),
    // NFS and other FUSE file systems, in /etc/fstab.
    ("bg", "x-systemd.automount mounts at the first access, and nofail lets the boot go on without the mount"),
    ("fg", "leave it out: mount(8) waits until the mount is ready"),
    ("hard", ORIGIN_TIMES),
    ("soft", ORIGIN_TIMES),
    ("intr", ORIGIN_TIMES),
    ("nointr", ORIGIN_TIMES),
    ("timeo", ORIGIN_TIMES),
    ("retrans", ORIGIN_TIMES),
    ("retry", ORIGIN_TIMES),
    ("rsize", "--max-write SIZE is the largest request of the kernel, --block-size SIZE the unit of fetches"),
    ("wsize", "--max-write SIZE is the largest request of the kernel"),
    ("actimeo", NAME_TIMES),
    ("acregmin", NAME_TIMES),
    ("acregmax", NAME_TIMES),
    ("acdirmin", NAME_TIMES),
    ("acdirmax", NAME_TIMES),
    ("noac", "--attr-cache 0, --entry-cache 0 and --dir-entry-cache 0 query the source at each lookup"),
    ("lookupcache", NAME_TIMES),
    ("nolock", "--local-locks keeps the locks of a writable mount in this mount"),
    ("local-lock", "--local-locks keeps the locks of a writable mount in this mount"),
    ("vers", NFS_ITSELF),
    ("nfsvers", NFS_ITSELF),
    ("proto", NFS_ITSELF),
    ("sec", NFS_ITSELF),
    ("port", NFS_ITSELF),
    ("tcp", NFS_ITSELF),
    ("udp", NFS_ITSELF),
    ("entry-timeout", "--entry-cache TIME"),
    ("negative-timeout", "--entry-cache TIME"),
    ("ac-attr-timeout", "--attr-cache TIME"),
    ("max-read", "--max-write SIZE is the largest request of the kernel"),
    ("max-background", "--fuse-threads N"),
    ("blksize", CACHE_ITSELF),
    ("big-writes", CACHE_ITSELF),
    ("large-read", CACHE_ITSELF),
    ("kernel-cache", KERNEL_PAGES),
    ("auto-cache", KERNEL_PAGES),
    ("direct-io", KERNEL_PAGES),
    ("hard-remove", CACHE_ITSELF),
    ("subtype", "leave it out: the type is fuse.spurline; fsname=NAME changes the name in the mount table"),
];

const WRITE_ADVICE: &str = "leave it out: --rw writes a bucket or a directory itself; a file is in the bucket when close or fsync returns, and \
                      nothing is uploaded later";
const UPLOADS_ITSELF: &str = "leave it out: files up to 8 MiB are one request, larger ones are uploaded in parts of 8 MiB and more, four at \
                      a time";
const ALLOWED_ADVICE: &str =
    "leave it out: --rw allows removals and changes of existing files; a mount without --rw allows none";
const ENCRYPTION_ADVICE: &str = "--sse AES256, or --sse aws:kms with --sse-kms-key-id KEY";
const BUCKET_DEFAULTS: &str = "there is none: new objects have the ACL that the bucket gives them";
const METADATA_ADVICE: &str = "leave it out: there is no metadata engine; names and attributes are those of the source";
const IN_THE_SOURCE: &str = "the folder is part of the source: s3://BUCKET/FOLDER";
const NAME_TIMES: &str =
    "--attr-cache TIME, --entry-cache TIME and --dir-entry-cache TIME are the cache times of names and attributes";
const NAME_MEMORY: &str = "leave it out: names have a share of --buffer-size SIZE";
const ORIGIN_TIMES: &str = "--origin-timeout TIME is the deadline of one read, retries included";
const ENDPOINT_ADVICE: &str = "--endpoint-url URL names the server, also one of Amazon's other endpoints";
const URL_STYLE: &str =
    "leave it out: with --endpoint-url URL the bucket is in the path, at Amazon's own endpoints in the host's name";
const ACCESS_KEY_ADVICE: &str = "set the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the process that uses the bucket, or write \
                    ~/.aws/credentials; a command line and /etc/fstab can be read by other users";
const CERTIFICATE_ADVICE: &str =
    "set the variable AWS_CA_BUNDLE=FILE, the authority that signed the server's certificate: it is always verified";
const SIGNATURE_ADVICE: &str = "leave it out: requests are signed by version 4, and not signed with --anonymous";
const RATE_ADVICE: &str =
    "there is none for readers: --max-downloads N limits concurrent reads, 'spurline load PATH --rate SIZE' a job";
const MODE_ADVICE: &str = "--file-mode MODE and --dir-mode MODE are the permission bits of all files and folders";
const FOLDER_ADVICE: &str = "leave it out: a folder is shown wherever keys lie below it, with and without a marker";
const ATTRIBUTE_ADVICE: &str = "leave it out: sizes and times are those of the source, without a further request";
const CACHE_ITSELF: &str = "leave it out: there is nothing to set";
const KERNEL_PAGES: &str =
    "leave it out: the kernel keeps the pages of a version, and drops them when the file is another one";
const NFS_ITSELF: &str = "leave it out: it is an option of NFS, and this file system has nothing of the kind";

/// Commands of other systems, with the remedy.
const FOREIGN_COMMANDS: [(&str, &str); 25] = [
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
    ("ls", "'spurline status' lists mounts and nodes; ls lists the files of a mount"),
    ("list", "'spurline status' lists mounts and nodes; ls lists the files of a mount"),
    ("df", "'spurline status' shows the space of the caches; df MOUNTPOINT shows that of the source"),
    ("version", "the flag -V prints it"),
    ("nodes", "'spurline status --registry coordinator://HOST:PORT' lists the nodes of a group"),
    ("format", MOUNTED_AS_IT_IS),
    ("auth", MOUNTED_AS_IT_IS),
    ("init", MOUNTED_AS_IT_IS),
    ("process", "'spurline node' runs a cache node, 'spurline coordinator' keeps their list"),
    ("gc", STAYS_AS_IT_IS),
    ("fsck", STAYS_AS_IT_IS),
    ("compact", STAYS_AS_IT_IS),
    ("dump", STAYS_AS_IT_IS),
    ("webdav", NFS_AND_S3),
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
const NFS_AND_S3: &str =
    "there is none; 'spurline gateway' serves S3 clients, 'spurline export MOUNTPOINT' NFS clients";

/// If clap refused a flag or a command of another system, a mount option that was written as a flag, or a flag that only
/// other services of `command` have: an error with what to do here.
pub fn explain_foreign_word(command: &Command, words: &[OsString], error: &clap::Error) -> Option<Fault> {
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let flag = context_word(error, ContextKind::InvalidArg)?;
            let called = words.get(1).and_then(|word| command.find_subcommand(word));
            let option = flag.trim_start_matches('-').replace('-', "_");
            let mounts = called.is_some_and(|called| called.get_name() == "mount");
            if mounts && fuse::is_known_option(&option) {
                let remedy = fuse::remedy_of_option(&option).map_or_else(|| format!("-o {option}"), str::to_owned);
                return Some(Fault::usage(format!("{flag} is a mount option"), remedy));
            }
            if let Some(remedy) = remedy_of_foreign_word(flag) {
                return Some(Fault::usage(format!("{flag} is a flag of another file system"), remedy));
            }
            explain_flag_of_services(command, flag)
        }
        ErrorKind::InvalidSubcommand => {
            let name = context_word(error, ContextKind::InvalidSubcommand)?;
            let (_, remedy) = FOREIGN_COMMANDS.iter().find(|(known, _)| *known == name)?;
            Some(Fault::usage(format!("{name} is a command of another file system"), *remedy))
        }
        _ => None,
    }
}

fn context_word(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    }
}

/// The equivalent of a flag or an option of another system; dashes and underscores are the same.
fn remedy_of_foreign_word(word: &str) -> Option<&'static str> {
    let word = word.trim_start_matches('-').to_ascii_lowercase().replace('_', "-");
    FOREIGN_WORDS.iter().find(|(known, _)| *known == word).map(|(_, remedy)| *remedy)
}

/// What does the same here as a key that another system's flag would have in the config file.
pub fn remedy_of_foreign_key(key: &str) -> Option<String> {
    remedy_of_foreign_word(key).map(as_options)
}

/// Where a mount option was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionPlace {
    /// Behind -o of `spurline mount`, beside the flags.
    BesideFlags,
    /// In /etc/fstab, behind -o of mount(8), or in a volume: flags are options too.
    InPlaceOfFlags,
}

/// Checks the mount options that were given to `spurline mount`, by flag, variable or file.
///
/// # Errors
/// For the first unknown option.
pub fn check_mount_options(options: &[String]) -> Result<(), Fault> {
    let mut words = options.iter().flat_map(|list| split_option_list(list));
    match words.find(|option| !fuse::is_known_option(option)) {
        None => Ok(()),
        Some(option) => {
            let flags = MountArgs::augment_args(Command::new("mount"));
            Err(unknown_option(&flags, &option, OptionPlace::BesideFlags))
        }
    }
}

/// The error for an option that is neither a mount option nor, in place of a flag, a flag of `flags`, the command `mount`.
pub fn unknown_option(flags: &Command, option: &str, place: OptionPlace) -> Fault {
    let written = option.trim_start_matches('-');
    let key = written.split(['=', ' ', '\t']).next().unwrap_or_default();
    let value = written.get(key.len() + 1..).map_or_else(String::new, |value| format!("={value}"));
    let unknown = Fault::usage(format!("-o {option}: unknown mount option"), "");
    let longs = || flags.get_arguments().flat_map(long_names).filter(|long| !["help", "version"].contains(long));
    // A long word is a flag with dashes, and a mount option with underscores.
    let own_option = format!("{}{value}", key.replace('-', "_"));
    if fuse::is_known_option(&own_option) {
        return Fault { remedy: format!("write {own_option}"), ..unknown };
    }
    if let Some(long) = longs().find(|long| *long == key.replace('_', "-")) {
        let remedy = match place {
            OptionPlace::InPlaceOfFlags => format!("write {long}{value}"),
            OptionPlace::BesideFlags => format!("it is a flag: --{long}{value}"),
        };
        return Fault { remedy, ..unknown };
    }
    if let Some(remedy) = remedy_of_foreign_word(key) {
        let remedy = match place {
            OptionPlace::InPlaceOfFlags => as_options(remedy),
            OptionPlace::BesideFlags => remedy.to_owned(),
        };
        return Fault::usage(format!("-o {option}: an option of another file system"), remedy);
    }
    let flags_too = longs().filter(|_| place == OptionPlace::InPlaceOfFlags);
    let remedy = match nearest_word(key, flags_too.chain(MOUNT_OPTIONS).chain(["fsname"]).chain(LABEL_OPTIONS)) {
        Some(near) => format!("did you mean {near}?"),
        None if place == OptionPlace::BesideFlags => {
            format!("the options are {}; {} have no effect", fuse::option_list(), fuse::ignored_option_list())
        }
        None => format!(
            "the options are {}, and the flags of 'spurline mount' without their dashes, such as cache-dir=DIR; 'spurline \
             mount --help' lists them; a comma inside a value is written as \\,; {} have no effect",
            fuse::option_list(),
            fuse::ignored_option_list()
        ),
    };
    Fault { remedy, ..unknown }
}

/// All names of a flag.
pub fn long_names(arg: &clap::Arg) -> impl Iterator<Item = &str> {
    arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default())
}

/// A remedy with flags in the form of options: `--attr-cache TIME` is `attr-cache=TIME`, outside of quoted commands.
fn as_options(remedy: &str) -> String {
    let mut text = String::new();
    let mut in_command = false;
    let mut words = remedy.split(' ').peekable();
    while let Some(word) = words.next() {
        in_command |= word.starts_with('\'');
        let flag = word.strip_prefix("--").filter(|_| !in_command);
        in_command &= !word.trim_end_matches([',', ';', ':', '.']).ends_with('\'');
        let takes_value = words.peek().is_some_and(|next| is_placeholder(next));
        match flag {
            Some("rw") => text.push_str("writable"),
            Some(flag) if takes_value => {
                text.push_str(flag);
                text.push('=');
                continue;
            }
            Some(flag) => text.push_str(flag),
            None if word == "-o" => continue,
            None => text.push_str(word),
        }
        text.push(' ');
    }
    text.trim_end().to_owned()
}

/// Whether a word stands for a value: `TIME`, `UID:GID`, 0.
fn is_placeholder(word: &str) -> bool {
    let word = word.trim_end_matches([',', ';', '.']);
    word == "0" || (!word.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b':'))
}

/// A flag that only services have, and not the command that was called.
fn explain_flag_of_services(command: &Command, flag: &str) -> Option<Fault> {
    let long = flag.strip_prefix("--")?;
    let services =
        command.get_subcommands().filter(|sub| sub.get_arguments().flat_map(long_names).any(|name| name == long));
    let names: Vec<&str> = services.map(Command::get_name).collect();
    if names.is_empty() || !names.iter().all(|name| SERVICE_COMMANDS.contains(name)) {
        return None;
    }
    let shown: Vec<String> = names.iter().map(|name| format!("'spurline {name}'")).collect();
    let commands = match shown.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => shown.concat(),
    };
    Some(Fault::usage(
        format!("{flag} is a flag of {commands}"),
        format!("give it there; 'spurline {} --help' describes it", names[0]),
    ))
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
        let ours: Vec<&str> = command.get_subcommands().flat_map(Command::get_arguments).flat_map(long_names).collect();
        for (index, (word, _)) in FOREIGN_WORDS.iter().enumerate() {
            assert!(!ours.contains(word), "{word} exists here");
            assert!(!fuse::is_known_option(&word.replace('-', "_")), "{word} is an option here");
            assert!(
                word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'),
                "{word}"
            );
            assert!(FOREIGN_WORDS[..index].iter().all(|(other, _)| other != word), "{word} is there twice");
        }
        for (word, remedy) in FOREIGN_WORDS.iter().chain(&FOREIGN_COMMANDS) {
            assert_eq!(unknown_commands(remedy, &command), [""; 0], "{word}");
            for part in remedy.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')) {
                let flag = part.strip_prefix("--");
                assert!(flag.is_none_or(|flag| ours.contains(&flag)), "{word}: {part} does not exist");
            }
        }
    }

    #[test]
    fn remedies_for_options_have_no_dashes() {
        for (remedy, wanted) in [
            ("--attr-cache TIME", "attr-cache=TIME"),
            ("--attr-cache TIME, --squash UID:GID", "attr-cache=TIME, squash=UID:GID"),
            ("--rw writes, -o nonempty too", "writable writes, nonempty too"),
            ("'spurline load PATH --rate SIZE' limits a job", "'spurline load PATH --rate SIZE' limits a job"),
            ("--entry-cache 0 and --log-filter=debug", "entry-cache=0 and log-filter=debug"),
            ("the profile 'default', or --region NAME", "the profile 'default', or region=NAME"),
        ] {
            assert_eq!(as_options(remedy), wanted);
        }
    }

    #[test]
    fn an_unknown_option_has_the_form_that_works() {
        let command = crate::cli::cli_command();
        let flags = command.find_subcommand("mount").unwrap();
        for (option, in_fstab, beside_flags) in [
            ("--uid=106", "write uid=106", "it is a flag: --uid=106"),
            ("cache_dir=/a", "write cache-dir=/a", "it is a flag: --cache-dir=/a"),
            ("region us-west-2", "write region=us-west-2", "it is a flag: --region=us-west-2"),
            ("allow-other", "write allow_other", "write allow_other"),
            ("--allow-other", "write allow_other", "write allow_other"),
            ("--read-only", "write read-only", "it is a flag: --read-only"),
            ("prefix data/", "part of the source", "part of the source"),
            ("--profile=x", "AWS_PROFILE=NAME", "AWS_PROFILE=NAME"),
            ("bg", "x-systemd.automount", "x-systemd.automount"),
            ("stat_cache_expire=60", "attr-cache=TIME", "--attr-cache TIME"),
            ("alow_other", "did you mean allow_other?", "did you mean allow_other?"),
            ("--alow_other", "did you mean allow_other?", "did you mean allow_other?"),
            ("zz", "the options are rw", "the options are rw"),
        ] {
            for (place, wanted) in [(OptionPlace::InPlaceOfFlags, in_fstab), (OptionPlace::BesideFlags, beside_flags)] {
                let fault = unknown_option(flags, option, place);
                assert!(fault.what.contains(&format!("-o {option}: ")), "{fault}");
                assert!(fault.remedy.contains(wanted), "{option}: {fault}");
            }
        }
        // The list is whole.
        let listed = unknown_option(flags, "zz", OptionPlace::BesideFlags).remedy;
        assert!(MOUNT_OPTIONS.iter().all(|option| listed.contains(option)) && listed.contains("nofail"), "{listed}");
    }
}
