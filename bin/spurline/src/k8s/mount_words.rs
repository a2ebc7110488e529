//! The words of `spurline mount` for a volume of the CSI driver, checked by the parser and the checks of `spurline mount` itself.
//! Starts nothing.

use crate::args::MountArgs;
use crate::fstab;
use clap::{Args as _, Command, FromArgMatches as _};
use spurline_config::budget::OUTSIDE;
use spurline_config::{Fault, HostLimits, RawMount};
use spurline_csi::{MountArguments, MountRequest, MountWords, NO_RECOVERY_OPTION};
use std::ffi::OsString;

/// Flags that make no sense for a volume, and why.
const REFUSED_VOLUME_FLAGS: [(&str, &str); 5] = [
    ("config", "write its keys as mount options of the volume"),
    ("background", "leave it out: the driver runs the process"),
    ("foreground", "leave it out: the driver runs the process"),
    ("log", "leave it out: the log is that of the mount pod (kubectl logs)"),
    ("group-token-file", "put the token into the volume's secret, under the key group-token"),
];

/// The oldest kernel on which a mount outlives its process.
const OLDEST_RECOVERING_KERNEL: [u32; 2] = [6, 9];

/// The parser of `spurline mount`.
#[derive(Debug, Clone, Copy)]
pub struct MountParser {
    /// Whether mounts of this host can outlive their processes.
    recovers: bool,
}

impl MountParser {
    pub fn of_this_host() -> MountParser {
        let system = rustix::system::uname();
        MountParser { recovers: is_recovering_kernel(&system.release().to_string_lossy()) }
    }
}

/// Whether the kernel of this release (`6.12.3-amd64`) sends requests to the next process of a mount.
fn is_recovering_kernel(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    [numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)] >= OLDEST_RECOVERING_KERNEL
}

impl MountArguments for MountParser {
    fn of_mount(&self, request: MountRequest<'_>) -> Result<MountWords, Fault> {
        words_of_mount(request, &HostLimits::detect(), self.recovers)
    }
}

/// The words, on a host with these limits. With `recovers` the mount outlives its process where the volume's options allow that.
///
/// # Errors
/// When `spurline mount` would refuse the words.
pub(super) fn words_of_mount(
    request: MountRequest<'_>,
    host: &HostLimits,
    recovers: bool,
) -> Result<MountWords, Fault> {
    let settings = request.settings;
    // Without environment variables: the driver's variables are not those of the mount process.
    let flags = MountArgs::augment_args(Command::new("mount"));
    // In /etc/fstab rw means nothing, because mount(8) adds the word; here a person wrote the word.
    let options = settings.options.iter().filter(|word| *word != NO_RECOVERY_OPTION);
    let options = options.map(|word| if word == "rw" { "writable".to_owned() } else { word.clone() });
    let options = fstab::flags_of_options(&flags, &options.collect::<Vec<_>>())?;
    let named = settings.flags.iter().map(|(flag, value)| OsString::from(format!("--{flag}={value}")));
    let mut given: Vec<OsString> = named.chain(options).collect();
    if let Some((flag, remedy)) = REFUSED_VOLUME_FLAGS.iter().find(|(flag, _)| has_flag(&given, flag)) {
        return Err(Fault::usage(format!("the mount option {flag} is not for volumes"), *remedy));
    }
    given.extend(request.own_flags.iter().map(|(flag, value)| OsString::from(format!("--{flag}={value}"))));
    // Containers run as any user.
    given.extend(["-o".into(), "allow_other".into()]);
    let places = [OsString::from(&settings.source), request.mountpoint.as_os_str().to_owned()];
    let mut memory = settings.memory.unwrap_or(request.default_memory);
    if !has_flag(&given, "buffer-size") {
        // As much as the limit allows, with room for what lies outside of the buffer.
        given.push(format!("--buffer-size={}M", (memory.saturating_sub(OUTSIDE) / 4 * 3) >> 20).into());
    } else if settings.memory.is_none() {
        let buffer = parse(&flags, &given, &places)?.volume.memory.buffer_size.0;
        memory = memory.max(buffer / 3 * 4 + OUTSIDE);
    }
    let mut raw = parse(&flags, &given, &places)?;
    let writable = raw.fuse.rw;
    let limits = HostLimits { cgroup: Some((memory, "the volume's attribute memory".into())), ..host.clone() };
    let is_unwanted = settings.options.iter().any(|word| word == NO_RECOVERY_OPTION);
    if recovers && !is_unwanted && !raw.fuse.recover {
        // The checks decide which other options allow recovery.
        let mut recovering = raw.clone();
        recovering.fuse.recover = true;
        if recovering.clone().check(&limits).is_ok() {
            given.push("--recover".into());
            raw = recovering;
        }
    }
    let recovers = raw.fuse.recover;
    raw.check(&limits)?;
    let words = [OsString::from("mount")].into_iter().chain(given).chain(["--".into()]).chain(places);
    let words = words.map(|word| word.into_string()).collect::<Result<_, _>>();
    let words = words.map_err(|word| Fault::usage(format!("{} is no text", word.display()), ""))?;
    Ok(MountWords { words, memory, writable, recovers })
}

fn has_flag(given: &[OsString], flag: &str) -> bool {
    given.iter().filter_map(|word| word.to_str()?.strip_prefix("--")).any(|word| {
        let name = word.split('=').next().unwrap_or_default();
        name == flag
    })
}

/// The raw settings of the words.
fn parse(flags: &Command, given: &[OsString], places: &[OsString]) -> Result<RawMount, Fault> {
    let words = [OsString::from("mount")].into_iter().chain(given.iter().cloned()).chain(["--".into()]);
    let matches = flags.clone().try_get_matches_from(words.chain(places.iter().cloned()));
    let parsed = matches.and_then(|matches| MountArgs::from_arg_matches(&matches));
    parsed.map(|args| args.settings).map_err(|error| {
        // The first paragraph has the fault; usage and hints are for a command line.
        let text = error.render().to_string();
        let first = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        let words: Vec<&str> = first.split_whitespace().collect();
        Fault::usage(format!("the volume's mount options: {}", words.join(" ")), "")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_csi::VolumeSettings;
    use std::path::Path;

    fn host() -> HostLimits {
        HostLimits { processors: 4, memory_bytes: Some(64 << 30), cgroup: None, ..HostLimits::detect() }
    }

    fn words(options: &[&str], memory: Option<u64>) -> Result<MountWords, Fault> {
        words_of("s3://b", Some("static:a:1,b:2"), options, memory)
    }

    fn words_of(
        source: &str,
        registry: Option<&str>,
        options: &[&str],
        memory: Option<u64>,
    ) -> Result<MountWords, Fault> {
        let settings = VolumeSettings {
            source: source.into(),
            options: options.iter().map(|word| (*word).to_owned()).collect(),
            flags: registry.map(|url| ("registry".into(), url.into())).into_iter().collect(),
            memory,
        };
        let own = [("group-token-file".to_owned(), "/t".to_owned())];
        let (mountpoint, default_memory) = (Path::new("/m"), 512 << 20);
        let request = MountRequest { settings: &settings, own_flags: &own, mountpoint, default_memory };
        words_of_mount(request, &host(), true)
    }

    #[test]
    fn options_become_words_that_the_program_accepts() {
        assert!(words(&["rdma-network=ib0:ib1"], None).unwrap().words.contains(&"--rdma-network=ib0:ib1".to_owned()));
        let made = words(&["file-mode=555", "noatime"], None).unwrap();
        let wanted = [
            "mount",
            "--registry=static:a:1,b:2",
            "--file-mode=555",
            "-o",
            "noatime",
            "--group-token-file=/t",
            "-o",
            "allow_other",
            "--buffer-size=336M",
            "--recover",
            "--",
            "s3://b",
            "/m",
        ];
        assert_eq!((made.words.as_slice(), made.memory), (&wanted.map(String::from)[..], 512 << 20));
        let whole = [vec!["spurline".to_owned()], made.words].concat();
        crate::cli::cli_command().try_get_matches_from(whole).unwrap();
    }

    #[test]
    fn files_of_a_volume_are_staged_through_nodes() {
        let registry = Some("coordinator://head:7400");
        let made = words_of("s3://b", registry, &["rw", "stage"], None).unwrap();
        assert!(made.writable && made.recovers && made.words.contains(&"--stage".to_owned()), "{made:?}");
        let said = words_of("s3://b", registry, &["stage"], None).unwrap_err().to_string();
        assert!(said.contains("--stage has no effect in a read-only mount"), "{said}");
        let said = words_of("s3://b", None, &["rw", "stage"], None).unwrap_err().to_string();
        assert!(said.contains("--stage without --registry"), "{said}");
    }

    #[test]
    fn a_label_is_one_option() {
        let made = words(&["context=system_u:object_r:container_file_t:s0:c1,c2"], None).unwrap();
        let wanted = "context=system_u:object_r:container_file_t:s0:c1\\,c2".to_owned();
        assert!(made.words.contains(&wanted), "{made:?}");
    }

    #[test]
    fn the_buffer_follows_the_memory_and_the_memory_the_buffer() {
        let made = words(&[], Some(4 << 30)).unwrap();
        assert!(made.words.contains(&"--buffer-size=3024M".to_owned()), "{made:?}");
        assert!(words(&["buffer-size=3000M"], None).unwrap().memory >= 4000 << 20);
        let said = words(&["buffer-size=900M"], Some(512 << 20)).unwrap_err().to_string();
        assert!(said.contains("--buffer-size 900") && said.contains("the volume's attribute memory"), "{said}");
    }

    #[test]
    fn mounts_outlive_their_processes_where_kernel_and_options_allow_that() {
        for (release, recovers) in
            [("6.8.0-45-generic", false), ("6.9", true), ("6.12.3+deb13-amd64", true), ("7.0", true)]
        {
            assert_eq!(is_recovering_kernel(release), recovers, "{release}");
        }
        for (options, recovers) in [(&[][..], true), (&["norecover"], false), (&["fuse-io=uring"], false)] {
            let made = words(options, None).unwrap();
            assert_eq!(
                (made.recovers, made.words.contains(&"--recover".to_owned())),
                (recovers, recovers),
                "{options:?}"
            );
        }
        for (source, registry) in [("/src", Some("static:a:1")), ("/src", None), ("s3://b", None)] {
            assert!(words_of(source, registry, &["rw"], None).unwrap().recovers, "{source} {registry:?}");
        }
    }

    #[test]
    fn rw_of_a_volume_is_the_flag() {
        assert!(words(&["rw"], None).unwrap().writable && !words(&[], None).unwrap().writable);
    }

    #[test]
    fn wrong_options_are_refused_in_one_sentence() {
        for (option, says) in [
            ("cachesize=10G", "did you mean cache-size?"),
            ("cache-size=much", "invalid value 'much' for '--cache-size"),
            ("background", "the mount option background is not for volumes"),
            ("config=/x", "write its keys as mount options"),
            ("group-token-file=/x", "under the key group-token"),
            ("block-size=3M", "block-size"),
            ("colour=red", "unknown mount option"),
            ("region us-west-2", "write region=us-west-2"),
            ("prefix data/", "part of the source"),
            ("allow-other", "write allow_other"),
        ] {
            let said = words(&[option], None).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{option}: {said}");
        }
    }
}
