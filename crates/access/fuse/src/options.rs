//! Parses mount options as given after `-o`. The mount code decides the effect.

use spurline_types::{LABEL_OPTIONS, escape_option, split_option_list};
use std::fmt::Write as _;

/// Parsed `-o` options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// The source shown in the mount table.
    pub fsname: String,
    /// The mount table shows `fuse.SUBTYPE`.
    pub subtype: String,
    /// The kernel itself rejects writes.
    pub read_only: bool,
    /// Other users may use the mount.
    pub allow_other: bool,
    /// Whether the kernel checks permissions by mode, owner and group; `None`: with `allow_other` only.
    pub default_permissions: Option<bool>,
    /// Mount over a non-empty directory or over another mount.
    pub nonempty: bool,
    /// Honour set-user-ID bits.
    pub suid: bool,
    /// Honour device files.
    pub dev: bool,
    /// Allow execution of programs.
    pub exec: bool,
    /// The mount table shows that reads update no access times: the source decides.
    pub noatime: bool,
    /// SELinux labels of the mount, for the kernel, in the form `context=LABEL`.
    pub labels: Vec<String>,
}

impl Default for MountOptions {
    fn default() -> Self {
        MountOptions {
            fsname: "spurline".into(),
            subtype: "spurline".into(),
            read_only: true,
            allow_other: false,
            default_permissions: None,
            nonempty: false,
            suid: false,
            dev: false,
            exec: true,
            noatime: true,
            labels: Vec::new(),
        }
    }
}

/// An unknown word after `-o`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{word}' is not a mount option; the options are {KNOWN_OPTIONS}")]
pub struct UnknownOption {
    /// The word.
    pub word: String,
}

const KNOWN_OPTIONS: &str = "ro, allow_other, (no_)default_permissions, nonempty, fsname=NAME, subtype=NAME, suid, nosuid, dev, \
                     nodev, exec, noexec, atime, noatime, relatime, strictatime, context=LABEL, fscontext=LABEL, defcontext=LABEL, rootcontext=LABEL";

impl MountOptions {
    /// Applies a comma-separated list (`ro,allow_other,fsname=data`); see [`split_option_list`].
    ///
    /// # Errors
    /// As [`MountOptions::apply_word`].
    pub fn apply_list(&mut self, list: &str) -> Result<(), UnknownOption> {
        split_option_list(list).iter().try_for_each(|word| self.apply_word(word))
    }

    /// Applies an option. Words for fstab only (`defaults`, `auto`, `user`, `_netdev`, `nofail`, `x-…`) are accepted without
    /// effect.
    ///
    /// # Errors
    /// On an unknown word.
    pub fn apply_word(&mut self, word: &str) -> Result<(), UnknownOption> {
        let (key, value) = word.split_once('=').map_or((word, None), |(k, v)| (k, Some(v)));
        match (key, value) {
            ("ro", None) => self.read_only = true,
            ("allow_other", None) => self.allow_other = true,
            ("default_permissions", None) => self.default_permissions = Some(true),
            ("no_default_permissions", None) => self.default_permissions = Some(false),
            ("nonempty", None) => self.nonempty = true,
            ("fsname", Some(v)) if !v.is_empty() => self.fsname = v.into(),
            ("subtype", Some(v)) if !v.is_empty() => self.subtype = v.into(),
            ("suid", None) => self.suid = true,
            ("nosuid", None) => self.suid = false,
            ("dev", None) => self.dev = true,
            ("nodev", None) => self.dev = false,
            ("exec", None) => self.exec = true,
            ("noexec", None) => self.exec = false,
            ("atime" | "relatime" | "strictatime", None) => self.noatime = false,
            ("noatime", None) => self.noatime = true,
            (key, Some(label)) if LABEL_OPTIONS.contains(&key) && !label.is_empty() && !label.contains('"') => {
                self.labels.push(word.to_owned());
            }
            ("defaults" | "auto" | "noauto" | "user" | "nouser" | "users" | "_netdev" | "nofail", None) => {}
            (key, _) if key.starts_with("x-") => {}
            _ => return Err(UnknownOption { word: word.to_owned() }),
        }
        Ok(())
    }

    /// Whether the kernel checks permissions. With `allow_other` and no check, other users could read files whose mode forbids
    /// that.
    pub fn checks_modes(&self) -> bool {
        self.default_permissions.unwrap_or(self.allow_other)
    }

    /// Flags for mount(2).
    pub(crate) fn mount_flags(&self) -> libc::c_ulong {
        let mut flags = 0;
        let mut set = |on: bool, flag: libc::c_ulong| {
            if on {
                flags |= flag;
            }
        };
        set(self.read_only, libc::MS_RDONLY);
        set(!self.suid, libc::MS_NOSUID);
        set(!self.dev, libc::MS_NODEV);
        set(!self.exec, libc::MS_NOEXEC);
        set(self.noatime, libc::MS_NOATIME);
        flags
    }

    /// The options that the kernel's fuse parses itself.
    pub(crate) fn kernel_words(&self, max_read: u32) -> String {
        let mut words = format!(",max_read={max_read}");
        if self.allow_other {
            words.push_str(",allow_other");
        }
        if self.checks_modes() {
            words.push_str(",default_permissions");
        }
        for (key, label) in self.labels.iter().filter_map(|option| option.split_once('=')) {
            // The kernel removes the quotes, which keep the commas of a label.
            let _ = write!(words, ",{key}=\"{label}\"");
        }
        words
    }

    /// The list for fusermount3, which sets nosuid and nodev by itself and allows only root to change that.
    pub(crate) fn fusermount_list(&self, max_read: u32) -> String {
        let escaped = escape_option(&self.fsname.replace('\\', "\\\\"));
        let subtype = escape_option(&self.subtype);
        let mut list = format!("fsname={escaped},subtype={subtype},max_read={max_read}");
        let mut add = |on: bool, word: &str| {
            if on {
                let _ = write!(list, ",{word}");
            }
        };
        add(self.read_only, "ro");
        add(self.allow_other, "allow_other");
        add(self.checks_modes(), "default_permissions");
        add(!self.exec, "noexec");
        add(self.noatime, "noatime");
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_gets_labels_in_quotes() {
        let mut options = MountOptions::default();
        options
            .apply_list("context=\"system_u:object_r:tmp_t:s0:c127,c456\",rootcontext=a:b:c,fscontext=a:b:d\\,e")
            .unwrap();
        let wanted = ",max_read=8192,context=\"system_u:object_r:tmp_t:s0:c127,c456\",rootcontext=\"a:b:c\",fscontext=\"a:b:d,e\"";
        assert_eq!(options.kernel_words(8192), wanted);
    }

    #[test]
    fn lists() {
        let mut o = MountOptions::default();
        o.apply_list("ro,allow_other,fsname=s3://b/a\\,b,noexec,_netdev,x-systemd.automount,").unwrap();
        assert_eq!(o.fsname, "s3://b/a,b");
        assert!(o.allow_other && !o.exec);
        assert_eq!(
            o.fusermount_list(8192),
            "fsname=s3://b/a\\,b,subtype=spurline,max_read=8192,ro,allow_other,default_permissions,noexec,noatime"
        );
        o.apply_list("no_default_permissions").unwrap();
        assert!(o.kernel_words(8192) == ",max_read=8192,allow_other");
        let mut o = MountOptions::default();
        assert!(o.kernel_words(8192) == ",max_read=8192");
        o.apply_list("default_permissions").unwrap();
        assert!(o.kernel_words(8192) == ",max_read=8192,default_permissions");
        for bad in ["rw", "allow_others", "ro=1", "fsname", "fsname=", "context", "context=", "context=a\"b"] {
            let said = o.apply_list(bad).unwrap_err().to_string();
            assert!(said.contains(bad) && said.contains("default_permissions"), "{said}");
        }
    }
}
