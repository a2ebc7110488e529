//! The meaning of a volume's attributes and mount options. The known mount options are a matter of the function that checks
//! options.

use serde::{Deserialize, Serialize};
use spurline_config::values::nearest_word;
use spurline_config::{Fault, Registry, SourceUrl};
use spurline_types::{Size, split_option_list};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Attributes of a volume, with the purpose.
const VOLUME_ATTRIBUTES: [&str; 5] = ["source", "registry", "cacheGroup", "mountOptions", "memory"];
/// Mount options of a volume that is written.
const WRITABLE_OPTIONS: [&str; 2] = ["rw", "writable"];
/// Mount options of inline volumes whose authors are not trusted: options without a file of the node, without a port, and without
/// more rights than the source's keys give.
const INLINE_OPTIONS: [&str; 38] = [
    "allow_other",
    "anonymous",
    "attr-cache",
    "cache-size",
    "default_permissions",
    "dir-entry-cache",
    "dir-mode",
    "endpoint-url",
    "entry-cache",
    "expected-bucket-owner",
    "file-mode",
    "gid",
    "hedge-after",
    "kernel-readahead",
    "max-downloads",
    "max-readahead",
    "nconnect",
    "noatime",
    "nodev",
    "noexec",
    "norecover",
    "nosuid",
    "origin-stall-timeout",
    "origin-timeout",
    "peer-silence",
    "peer-timeout",
    "rdma-network",
    "read-only",
    "region",
    "replicas",
    "request-payer",
    "ro",
    "sse",
    "sse-kms-key-id",
    "stale-if-error",
    "storage-class",
    "transport",
    "uid",
];
/// The mount option of a volume whose mount ends with its process.
pub const NO_RECOVERY_OPTION: &str = "norecover";
/// Attributes that Kubernetes adds begin with this.
const KUBERNETES_PREFIX: &str = "csi.storage.k8s.io/";
/// The prefix of attributes that the provisioner adds.
const PROVISIONER_PREFIX: &str = "storage.kubernetes.io/";

/// The source and the flags of a mount, from a volume's attributes and mount options.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSettings {
    /// The origin's URL or directory.
    pub source: String,
    /// Flags of `spurline mount` without dashes, with values.
    pub flags: Vec<(String, String)>,
    /// Mount options in the form of mount(8), each without escapes and quotes.
    pub options: Vec<String>,
    /// Memory limit of the mount process in bytes, if the volume names a limit.
    pub memory: Option<u64>,
}

/// A mount to be checked and put into words.
#[derive(Debug, Clone, Copy)]
pub struct MountRequest<'a> {
    /// The settings of the mount.
    pub settings: &'a VolumeSettings,
    /// Flags of the driver, after those of the volume.
    pub own_flags: &'a [(String, String)],
    /// Where.
    pub mountpoint: &'a Path,
    /// Memory limit of the process in bytes where the volume names none.
    pub default_memory: u64,
}

/// The checked words of a mount process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountWords {
    /// The arguments of `spurline`.
    pub words: Vec<String>,
    /// Memory limit of the process in bytes.
    pub memory: u64,
    /// Whether the source is changed through the mount.
    pub writable: bool,
    /// Whether the mount outlives its process.
    pub recovers: bool,
}

/// Checks a mount with the parser of `spurline mount`, before a process is started.
pub trait MountArguments: Send + Sync + 'static {
    /// The words of the process.
    ///
    /// # Errors
    /// When `spurline mount` would refuse the flags.
    fn of_mount(&self, request: MountRequest<'_>) -> Result<MountWords, Fault>;
}

impl VolumeSettings {
    /// Whether the options ask for a mount that changes the source.
    pub fn is_writable(&self) -> bool {
        self.options.iter().any(|option| WRITABLE_OPTIONS.contains(&option.as_str()))
    }

    /// Checks an inline volume, which the author of any pod may write: the mount process has more rights than that author.
    ///
    /// # Errors
    /// When the volume would read directories of the node, files of the mount process or a bucket with the node's rights, or take
    /// more memory than the driver grants.
    pub fn check_inline(&self, secrets: &HashMap<String, String>) -> Result<(), Fault> {
        let source: SourceUrl =
            self.source.parse().map_err(|what: String| Fault::usage(what, "correct the attribute source"))?;
        if source.scheme() == "file" {
            return refuse_inline(format!("the directory {} as its source", self.source));
        }
        if let Some(option) =
            self.options.iter().map(|option| option_name(option)).find(|name| !INLINE_OPTIONS.contains(&name.as_str()))
        {
            return refuse_inline(format!("the mount option {option}"));
        }
        if self.memory.is_some() {
            return refuse_inline("the attribute memory".to_owned());
        }
        let registry = self.flags.iter().find(|(name, _)| name == "registry").map(|(_, url)| url.parse());
        // The options there name files, whose content would be sent to servers that the pod's author chooses.
        if let Some(Ok(Registry::Etcd(url))) = &registry
            && (url.user.is_some()
                || [&url.ca, &url.cert, &url.key, &url.password_file].iter().any(|file| file.is_some()))
        {
            return refuse_inline("a registry with a user or with files".to_owned());
        }
        let keys = match source.scheme() {
            "s3" => secrets.contains_key("AWS_ACCESS_KEY_ID"),
            "gs" => secrets.contains_key("google-credentials.json"),
            _ => false,
        };
        if registry.is_none() && !keys && !self.options.iter().any(|option| option == "anonymous") {
            return Err(Fault::usage(
                format!("the inline volume of {} has no keys, and those of the node are not for pods", self.source),
                "name a secret with its keys in nodePublishSecretRef, give the mount option anonymous, or make a \
                 PersistentVolume",
            ));
        }
        Ok(())
    }

    /// The directory that is the source, if any.
    pub fn source_dir(&self) -> Option<PathBuf> {
        let path = match self.source.split_once("://") {
            Some((scheme, path)) if scheme.eq_ignore_ascii_case("file") => path,
            Some(_) => return None,
            None => &self.source,
        };
        path.starts_with('/').then(|| PathBuf::from(path))
    }

    /// Reads a volume's attributes, and the mount options of a PersistentVolume or StorageClass.
    ///
    /// # Errors
    /// When an attribute is unknown, a value is wrong, or the source is missing.
    pub fn parse(attributes: &HashMap<String, String>, mount_flags: &[String]) -> Result<Self, Fault> {
        let mut settings = VolumeSettings::default();
        // Sorted, so that the same attributes give the same record.
        let mut sorted: Vec<_> = attributes.iter().collect();
        sorted.sort();
        for (name, value) in sorted {
            match name.as_str() {
                "source" => settings.source = value.trim().to_owned(),
                "registry" => settings.flags.push(("registry".into(), value.clone())),
                "cacheGroup" => settings.flags.push(("cache-group".into(), value.clone())),
                "mountOptions" => settings.options.extend(split_option_list(value)),
                "memory" => settings.memory = Some(parse_memory(value)?),
                other if other.starts_with(KUBERNETES_PREFIX) || other.starts_with(PROVISIONER_PREFIX) => {}
                other => {
                    let remedy = match nearest_word(other, VOLUME_ATTRIBUTES.into_iter()) {
                        Some(near) => format!("did you mean {near}?"),
                        None => format!("the attributes are {}", VOLUME_ATTRIBUTES.join(", ")),
                    };
                    return Err(Fault::usage(format!("the volume has the unknown attribute '{other}'"), remedy));
                }
            }
        }
        settings.options.extend(mount_flags.iter().flat_map(|flag| split_option_list(flag)));
        if settings.source.is_empty() {
            return Err(Fault::usage(
                "the volume has no attribute 'source'",
                "give the bucket or directory to mount, such as source: s3://datasets, in volumeAttributes of the \
                 PersistentVolume or in parameters of the StorageClass",
            ));
        }
        Ok(settings)
    }
}

/// The remedy for an inline volume that asks for too much.
const INLINE_REMEDY: &str = "make a PersistentVolume, or start the driver with --trust-inline-volumes where every author of a pod may \
     have the node's rights";

fn refuse_inline(what: String) -> Result<(), Fault> {
    Err(Fault::usage(format!("an inline volume can't have {what}"), INLINE_REMEDY))
}

fn option_name(option: &str) -> String {
    option.split('=').next().unwrap_or_default().to_owned()
}

/// A memory limit as in Kubernetes (512Mi, 2Gi) or as in flags (512M).
fn parse_memory(value: &str) -> Result<u64, Fault> {
    parse_quantity(value).ok_or_else(|| {
        Fault::usage(format!("the volume's attribute memory '{value}' is no size"), "write 512Mi or 2Gi")
    })
}

/// The bytes of a size as in Kubernetes or as in flags; both count in powers of two here.
pub(crate) fn parse_quantity(text: &str) -> Option<u64> {
    let text = text.trim();
    text.strip_suffix('i').unwrap_or(text).parse::<Size>().ok().map(|size| size.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(pairs: &[(&str, &str)], flags: &[&str]) -> Result<VolumeSettings, Fault> {
        let attributes = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        VolumeSettings::parse(&attributes, &flags)
    }

    #[test]
    fn attributes_and_options_become_settings() {
        let settings = parsed(
            &[
                ("source", "s3://datasets"),
                ("registry", "static:a:1,b:2"),
                ("cacheGroup", "train"),
                ("mountOptions", "file-mode=555, allow_other,replicas=2\\,/a=3"),
                ("memory", "1Gi"),
                ("csi.storage.k8s.io/ephemeral", "true"),
                ("storage.kubernetes.io/csiProvisionerIdentity", "x"),
            ],
            &["max-readahead=8M", "context=\"system_u:object_r:container_file_t:s0:c1,c2\""],
        )
        .unwrap();
        assert_eq!(settings.source, "s3://datasets");
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(settings.flags, [pair("cache-group", "train"), pair("registry", "static:a:1,b:2")]);
        let label = "context=system_u:object_r:container_file_t:s0:c1,c2";
        assert_eq!(settings.options, ["file-mode=555", "allow_other", "replicas=2,/a=3", "max-readahead=8M", label]);
        assert_eq!(settings.memory, Some(1 << 30));
    }

    #[test]
    fn inline_volumes_have_no_rights_of_the_node() {
        let check = |pairs: &[(&str, &str)], secrets: &[&str]| {
            let secrets = secrets.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
            let checked = parsed(pairs, &[]).unwrap().check_inline(&secrets);
            checked.map_err(|fault| fault.to_string())
        };
        let keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
        let bucket = ("source", "s3://b/x");
        for (pairs, secrets) in [
            (&[bucket, ("mountOptions", "cache-size=5G,file-mode=444,ro,uid=1000,gid=1000")][..], &keys[..]),
            (&[bucket, ("mountOptions", "anonymous,endpoint-url=http://h:9000")], &[]),
            (&[bucket, ("registry", "static:a:1"), ("cacheGroup", "g")], &["group-token"]),
            (&[bucket, ("registry", "etcd://a:2379,b:2379")], &["group-token"]),
            (&[("source", "gs://b/x")], &["google-credentials.json"]),
        ] {
            check(pairs, secrets).unwrap();
        }
        for (pairs, says) in [
            (&[("source", "/etc")][..], "the directory /etc as its source"),
            (&[("source", "file:///etc"), ("registry", "static:a:1")], "the directory file:///etc"),
            (&[("source", "FILE:///etc")], "the directory FILE:///etc"),
            (&[("source", "proc")], "the directory proc"),
            (&[bucket, ("registry", "etcd://h:1?user=u&password-file=/etc/shadow")], "a registry with a user"),
            (&[bucket, ("registry", "etcd://h:1?ca=/etc/x")], "with files"),
            (&[("source", "gs://b")], "has no keys"),
            (&[("source", "az://b")], "has no keys"),
            (&[bucket, ("mountOptions", "ro,access-log=/etc/x")], "the mount option access-log"),
            (&[bucket, ("mountOptions", "metrics=0.0.0.0:1")], "the mount option metrics"),
            (&[bucket, ("mountOptions", "rw")], "the mount option rw"),
            (&[bucket, ("memory", "900Gi")], "the attribute memory"),
            (&[bucket], "has no keys"),
        ] {
            let own = pairs.contains(&bucket) && says == "has no keys";
            let secrets: &[&str] = if own { &["google-credentials.json"] } else { &keys };
            let said = check(pairs, secrets).unwrap_err();
            assert!(said.contains(says) && said.contains("PersistentVolume"), "{said}");
        }
        assert!(INLINE_OPTIONS.is_sorted());
    }

    #[test]
    fn wrong_attributes_are_refused_with_the_nearest() {
        for (pairs, says) in [
            (&[("sorce", "s3://b")][..], "did you mean source?"),
            (&[("source", "s3://b"), ("colour", "red")], "the attributes are source, registry"),
            (&[], "no attribute 'source'"),
            (&[("source", " ")], "no attribute 'source'"),
            (&[("source", "s3://b"), ("memory", "much")], "memory 'much' is no size"),
        ] {
            let said = parsed(pairs, &[]).unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }
}
