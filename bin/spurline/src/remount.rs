//! `mount -o remount`: changes what the kernel decides about a mount, above all whether programs may change files. The mount's
//! process does not learn of the change, and the settings stay.

use crate::report::print_note;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};
use spurline_config::Fault;
use spurline_observe::documents::ProcessRole;
use spurline_observe::locate::FS_TYPE;
use spurline_runtime::locator::locate_path;
use spurline_sys::{MountEntry, mounted_at, resolve_mountpoint};
use std::path::Path;
use std::time::Duration;

/// Deadline of the query whether the mount was made for changes.
const STATUS_ANSWER: Duration = Duration::from_secs(5);

/// The options that the kernel can change: the flag, and whether the option sets the flag.
const FLAG_OPTIONS: [(&str, MountFlags, bool); 13] = [
    ("ro", MountFlags::RDONLY, true),
    ("rw", MountFlags::RDONLY, false),
    ("nosuid", MountFlags::NOSUID, true),
    ("suid", MountFlags::NOSUID, false),
    ("nodev", MountFlags::NODEV, true),
    ("dev", MountFlags::NODEV, false),
    ("noexec", MountFlags::NOEXEC, true),
    ("exec", MountFlags::NOEXEC, false),
    ("nodiratime", MountFlags::NODIRATIME, true),
    ("diratime", MountFlags::NODIRATIME, false),
    ("noatime", MountFlags::NOATIME, true),
    ("relatime", MountFlags::NOATIME, false),
    ("strictatime", MountFlags::NOATIME, false),
];

/// Changes the mount at `mountpoint`. Other options are those of /etc/fstab or of the mount table, and are not compared.
///
/// # Errors
/// When no mount of Spurline is there, files are open for writing, the mount was not made for changes, or this user may not.
pub fn run(mountpoint: &Path, options: &[String]) -> Result<(), Fault> {
    let shown = mountpoint.display();
    let found = resolve_mountpoint(mountpoint).and_then(|path| mounted_at(&path));
    let found = found.map_err(|error| Fault::failed(format!("{shown}: {error}"), "name a mountpoint"))?;
    let Some(entry) = found.filter(|entry| entry.fstype == FS_TYPE) else {
        return Err(Fault::failed(
            format!("{shown} is not a mount of Spurline"),
            "mount it first: mount -t spurline SOURCE MOUNTPOINT",
        ));
    };
    let before = flags_of_entry(&entry);
    let after = change_flags(before, options);
    if (before ^ after).contains(MountFlags::NOATIME) {
        return Err(Fault::usage(
            format!("the rule for access times of {shown} is that of its start"),
            format!("unmount it (spurline umount {shown}), and mount it with that option"),
        ));
    }
    if before.contains(MountFlags::RDONLY) && !after.contains(MountFlags::RDONLY) {
        check_made_for_changes(&entry)?;
    }
    mount_remount(&entry.mountpoint, after, c"").map_err(|errno| refusal(&entry, errno))?;
    let kept: Vec<&str> = options.iter().map(String::as_str).filter(|option| is_setting(option, &entry)).collect();
    if !kept.is_empty() {
        print_note(&format!("settings of the mount's process stay as they were at its start: {}", kept.join(", ")));
    }
    Ok(())
}

fn flags_of_entry(entry: &MountEntry) -> MountFlags {
    // A file system that is read-only is so at each mountpoint.
    let words = entry.flags.split(',').chain(entry.has_option("ro").then_some("ro"));
    let set = words.filter_map(|word| FLAG_OPTIONS.iter().find(|(name, _, sets)| *sets && *name == word));
    set.fold(MountFlags::empty(), |flags, (_, flag, _)| flags | *flag)
}

fn change_flags(before: MountFlags, options: &[String]) -> MountFlags {
    let named = options.iter().filter_map(|word| FLAG_OPTIONS.iter().find(|(name, ..)| name == word));
    named.fold(before, |flags, (_, flag, sets)| if *sets { flags | *flag } else { flags - *flag })
}

/// Whether an option belongs to the mount's process: none of mount(8), and none that the mount table shows.
fn is_setting(option: &str, entry: &MountEntry) -> bool {
    let is_flag = FLAG_OPTIONS.iter().any(|(name, ..)| *name == option);
    let is_shown = entry.has_option(option) || entry.flags.split(',').any(|flag| flag == option);
    let is_for_mount = matches!(option, "remount" | "defaults" | "atime" | "norelatime" | "lazytime" | "nolazytime");
    !(is_flag || is_shown || is_for_mount || spurline_config::fuse::is_ignored(option))
}

fn check_made_for_changes(entry: &MountEntry) -> Result<(), Fault> {
    let shown = entry.mountpoint.display();
    let status = locate_path(&entry.mountpoint).and_then(|(_, peer)| Ok(peer.fetch_status(STATUS_ANSWER)?));
    match status.map(|status| status.role) {
        Ok(ProcessRole::Mount(mount)) if mount.writes.writable => Ok(()),
        Ok(_) => Err(Fault::failed(
            format!("{shown} was mounted read-only, and its process takes no changes"),
            format!(
                "unmount it (spurline umount {shown}), and mount it with --rw; the option for mount(8) is writable"
            ),
        )),
        Err(error) => Err(Fault::failed(
            format!("whether {shown} was mounted with --rw is not known: {error}"),
            "see its log; without a process, unmount it and mount it again",
        )),
    }
}

fn refusal(entry: &MountEntry, errno: Errno) -> Fault {
    let shown = entry.mountpoint.display();
    match errno {
        Errno::BUSY => Fault::failed(
            format!("{shown} can't become read-only: files are open for writing, or are being removed"),
            format!("close them (fuser -vm {shown}), and remount again"),
        ),
        Errno::PERM | Errno::ACCESS => {
            Fault::missing(format!("{shown} can't be changed by this user: {errno}"), "remount it as root")
        }
        _ => Fault::failed(format!("the kernel refused to change {shown}: {errno}"), "unmount it, and mount it again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_change_the_flags_that_they_name() {
        let options = |list: &str| list.split(',').map(str::to_owned).collect::<Vec<_>>();
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        let of_table = options("rw,nosuid,nodev,noatime,user_id=0,max_read=1048576,remount,ro");
        assert_eq!(change_flags(flags, &of_table), flags | MountFlags::RDONLY);
        assert_eq!(
            change_flags(flags | MountFlags::RDONLY, &options("ro,remount,rw,suid")),
            flags - MountFlags::NOSUID
        );
        let table = b"40 35 0:50 / /m rw,nosuid,relatime - fuse.spurline s3://b ro,user_id=1000,allow_other\n";
        let table = spurline_sys::MountTable::parse(table);
        let entry = &table.entries()[0];
        assert_eq!(flags_of_entry(entry), MountFlags::RDONLY | MountFlags::NOSUID);
        let of_fstab = options("remount,rw,user_id=1000,relatime,_netdev,x-systemd.automount,cache-size=1G");
        let settings: Vec<_> = of_fstab.iter().filter(|option| is_setting(option, entry)).collect();
        assert_eq!(settings, ["cache-size=1G"]);
    }
}
