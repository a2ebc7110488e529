//! `mount -t spurline` and /etc/fstab: translates the arguments of mount(8)'s helper `mount.spurline` to those of `spurline
//! mount`. Mounts nothing.

use crate::habits::{self, OptionPlace};
use crate::remount;
use spurline_config::{Fault, fuse};
use spurline_types::{escape_option, split_option_list};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;

const HELPER_NAMES: [&str; 2] = ["mount.spurline", "mount.fuse.spurline"];
const HELPER_USAGE: &str = "mount -t spurline SOURCE MOUNTPOINT [-o OPTION,…], or as a line of /etc/fstab";

/// Replaces this process by `spurline mount` if mount(8) called this as a helper; else `None`.
pub fn run_as_helper(command: &clap::Command, words: &[OsString]) -> Option<Fault> {
    let name = Path::new(words.first()?).file_name()?.to_str()?;
    if !HELPER_NAMES.contains(&name) {
        return None;
    }
    let flags = command.find_subcommand("mount")?;
    let told = match translate_options(flags, &words[1..]) {
        Ok(HelperOrder::Mount(told)) => told,
        Ok(HelperOrder::Remount { mountpoint, options }) => {
            return remount::run(Path::new(&mountpoint), &options).map_or_else(Some, |()| std::process::exit(0));
        }
        // mount(8) only checks that the helper exists.
        Ok(HelperOrder::Nothing) => std::process::exit(0),
        Err(fault) => return Some(fault),
    };
    let error = match std::env::current_exe() {
        Ok(own) => std::process::Command::new(own).arg0("spurline").args(told).exec(),
        Err(error) => error,
    };
    Some(Fault::failed(format!("this program can't start itself: {error}"), "mount /proc"))
}

/// What mount(8) wants of the helper.
#[derive(Debug, PartialEq)]
enum HelperOrder {
    /// A mount, with the arguments of `spurline`.
    Mount(Vec<OsString>),
    /// A change of a mount (`-o remount`), with all options.
    Remount { mountpoint: OsString, options: Vec<String> },
    /// Nothing (`mount -f`).
    Nothing,
}

fn translate_options(flags: &clap::Command, words: &[OsString]) -> Result<HelperOrder, Fault> {
    let mut places = Vec::new();
    let mut given = Vec::new();
    let mut modes_of_letters = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_bytes() {
            b"-o" => {
                let options = words.next().ok_or_else(|| helper_usage_fault("-o wants options".into()))?;
                let options =
                    options.to_str().ok_or_else(|| helper_usage_fault(format!("-o {}: no text", options.display())))?;
                given.extend(split_option_list(options));
            }
            // mount(8) handles types and namespaces.
            b"-t" | b"-N" => drop(words.next()),
            [b'-', letters @ ..] if !letters.is_empty() => {
                if letters.contains(&b'f') {
                    return Ok(HelperOrder::Nothing);
                }
                if !letters.iter().all(|letter| b"snvrw".contains(letter)) {
                    return Err(helper_usage_fault(format!("{}: unknown argument", word.display())));
                }
                let modes = letters.iter().filter_map(|letter| match letter {
                    b'r' => Some("ro".to_owned()),
                    b'w' => Some("rw".to_owned()),
                    _ => None,
                });
                modes_of_letters.extend(modes);
            }
            _ => places.push(word.clone()),
        }
    }
    let places: [OsString; 2] = places
        .try_into()
        .map_err(|places: Vec<_>| helper_usage_fault(format!("a source and a mountpoint, not {}", places.len())))?;
    if given.iter().any(|option| option == "remount") {
        let [_, mountpoint] = places;
        given.extend(modes_of_letters);
        return Ok(HelperOrder::Remount { mountpoint, options: given });
    }
    let given = flags_of_options(flags, &given)?.into_iter();
    let begins = ["mount", "-d"].map(OsString::from).into_iter();
    // After the dashes, as a path may begin with a dash.
    Ok(HelperOrder::Mount(begins.chain(given).chain(["--".into()]).chain(places).collect()))
}

fn helper_usage_fault(what: String) -> Fault {
    Fault::usage(what, HELPER_USAGE)
}

/// The words of `spurline mount` for options in mount(8)'s form.
///
/// # Errors
/// When an option is neither a mount option nor a flag of `flags`, the command `mount`.
pub fn flags_of_options(flags: &clap::Command, options: &[String]) -> Result<Vec<OsString>, Fault> {
    let is_flag = |key: &str| {
        flags.get_arguments().any(|arg| {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            arg.get_long().into_iter().chain(aliases).any(|long| long == key)
        })
    };
    let mut given = Vec::new();
    for option in options {
        let key = option.split('=').next().unwrap_or_default();
        if option == "rw" {
            // mount(8) adds this to all options; the word for a writable mount is `writable`.
        } else if is_flag(key) {
            given.push(format!("--{option}").into());
        } else if fuse::is_known_option(option) {
            given.extend(["-o".into(), escape_option(option).into()]);
        } else {
            return Err(habits::unknown_option(flags, option, OptionPlace::InPlaceOfFlags));
        }
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(words: &[&str]) -> Result<Option<Vec<String>>, Fault> {
        let command = crate::cli::cli_command();
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        Ok(match translate_options(command.find_subcommand("mount").unwrap(), &words)? {
            HelperOrder::Mount(told) => Some(told.into_iter().map(|word| word.into_string().unwrap()).collect()),
            HelperOrder::Remount { mountpoint, options } => {
                Some([vec!["remount".into(), mountpoint.into_string().unwrap()], options].concat())
            }
            HelperOrder::Nothing => None,
        })
    }

    #[test]
    fn a_comma_inside_a_value_is_escaped() {
        let line = ["s3://data", "/mnt", "-o", r"ro,registry=static:a:7000\,b:7000,cache-group=g", "-r"];
        let told = told(&line).unwrap().unwrap();
        assert!(told.contains(&"--registry=static:a:7000,b:7000".to_owned()), "{told:?}");
        assert!(told.contains(&"--cache-group=g".to_owned()), "{told:?}");
    }

    #[test]
    fn labels_and_names_with_commas_reach_the_mount_whole() {
        let label = "system_u:object_r:httpd_sys_content_t:s0:c1,c2";
        let line = ["a", "b", "-o", &format!("context=\"{label}\",fsname=x\\,y,defcontext=a:b:c")];
        let told = told(&line).unwrap().unwrap();
        let command = crate::cli::cli_command();
        let matches = command.try_get_matches_from([vec!["spurline".into()], told].concat()).unwrap();
        let lists = matches.subcommand_matches("mount").unwrap().get_many::<String>("options").unwrap();
        let words: Vec<String> = lists.flat_map(|list| split_option_list(list)).collect();
        assert_eq!(words, [&format!("context={label}"), "fsname=x,y", "defcontext=a:b:c"]);
    }

    #[test]
    fn words_of_mount_are_words_of_this_program() {
        let line = ["s3://data", "/mnt/data", "-v", "-o", "rw,_netdev,cache-dir=/a:/b,allow_other,no-passthrough"];
        let wanted = [
            "mount",
            "-d",
            "-o",
            "_netdev",
            "--cache-dir=/a:/b",
            "-o",
            "allow_other",
            "--no-passthrough",
            "--",
            "s3://data",
            "/mnt/data",
        ];
        assert_eq!(told(&line).unwrap().unwrap(), wanted);
        // The program accepts the translated arguments, and reports unknown ones.
        let parse = |words: Vec<String>| {
            crate::cli::cli_command().try_get_matches_from([vec!["spurline".into()], words].concat())
        };
        parse(told(&line).unwrap().unwrap()).unwrap();
        let writable = told(&["a", "b", "-o", "rw,writable"]).unwrap().unwrap();
        assert_eq!(writable, ["mount", "-d", "--writable", "--", "a", "b"]);
        parse(writable).unwrap();
        assert_eq!(told(&["-f", "a", "b"]).unwrap(), None);
        assert_eq!(told(&["-t", "spurline", "a", "b"]).unwrap().unwrap(), ["mount", "-d", "--", "a", "b"]);
        for (words, says) in [(&["a"][..], "not 1"), (&["a", "b", "-x"], "-x"), (&["a", "b", "-o"], "-o wants")] {
            let said = told(words).unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }

    #[test]
    fn an_unknown_option_is_refused_with_the_nearest_flag_or_option() {
        for (option, says) in [
            ("cachedir=/a", "did you mean cache-dir?"),
            ("--uid=106", "write uid=106"),
            ("bg", "nofail"),
            ("alow_other", "did you mean allow_other?"),
            ("colour=red", "the flags of 'spurline mount' without their dashes, such as cache-dir=DIR"),
        ] {
            let fault = told(&["a", "b", "-o", option]).unwrap_err();
            assert_eq!(fault.code as u8, 2);
            let said = fault.to_string();
            assert!(said.contains(&format!("-o {option}: ")) && said.contains(says), "{said}");
        }
    }

    #[test]
    fn a_remount_has_the_options_of_mount_as_they_are() {
        let of_table = ["a", "b", "-r", "-o", "rw,nosuid,user_id=0,max_read=1048576,remount"];
        let told = told(&of_table).unwrap().unwrap();
        assert_eq!(told, ["remount", "b", "rw", "nosuid", "user_id=0", "max_read=1048576", "remount", "ro"]);
    }
}
