//! The secrets of a volume, as files that only root may read. The content is in no argument, variable, label or log.

use crate::record::make_private_dir;
use spurline_config::Fault;
use spurline_config::values::nearest_word;
use spurline_sys::replace_file;
use std::collections::HashMap;
use std::path::Path;

/// Keys that together make a file of AWS credentials, and the names there.
const AWS_KEYS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "aws_access_key_id"),
    ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"),
    ("AWS_SESSION_TOKEN", "aws_session_token"),
];
/// Keys whose file a flag of `spurline mount` names.
const FLAG_KEYS: [(&str, &str); 4] =
    [("group-token", "group-token-file"), ("tls.crt", "tls-cert"), ("tls.key", "tls-key"), ("ca.crt", "tls-ca")];
/// Keys whose file a variable names.
const VARIABLE_KEYS: [(&str, &str); 2] =
    [("google-credentials.json", "GOOGLE_APPLICATION_CREDENTIALS"), ("ca-bundle.crt", "AWS_CA_BUNDLE")];

/// How the mount process finds secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SecretFiles {
    /// Flags of `spurline mount` without dashes, with the files.
    pub flags: Vec<(String, String)>,
    /// Variables that name files.
    pub environment: Vec<(String, String)>,
}

/// Checks the keys of a secret.
///
/// # Errors
/// When a key is unknown, or half of a pair is missing.
pub(crate) fn check_secrets(secrets: &HashMap<String, String>) -> Result<(), Fault> {
    for key in secrets.keys() {
        if !known_keys().any(|name| name == key) {
            let remedy = match nearest_word(key, known_keys()) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("the keys are {}", known_keys().collect::<Vec<_>>().join(", ")),
            };
            return Err(Fault::usage(format!("the volume's secret has the unknown key '{key}'"), remedy));
        }
    }
    for (one, other) in [
        (AWS_KEYS[0].0, AWS_KEYS[1].0),
        (AWS_KEYS[1].0, AWS_KEYS[0].0),
        (AWS_KEYS[2].0, AWS_KEYS[0].0),
        ("tls.crt", "tls.key"),
    ] {
        if secrets.contains_key(one) && !secrets.contains_key(other) {
            return Err(Fault::usage(
                format!("the volume's secret has {one} and no {other}"),
                format!("add {other} to the secret"),
            ));
        }
    }
    let broken = AWS_KEYS.iter().filter_map(|(key, _)| secrets.get_key_value(*key)).find(|(_, text)| {
        let text = text.trim_end_matches(['\n', '\r']);
        text.is_empty() || text.chars().any(|c| c.is_control() || c.is_whitespace())
    });
    if let Some((key, _)) = broken {
        return Err(Fault::usage(
            format!("{key} of the volume's secret is empty or has a blank or a line break inside"),
            "make the secret again, for example with kubectl create secret generic NAME --from-literal=KEY=VALUE",
        ));
    }
    Ok(())
}

fn known_keys() -> impl Iterator<Item = &'static str> {
    AWS_KEYS.iter().map(|(key, _)| *key).chain(FLAG_KEYS.iter().chain(&VARIABLE_KEYS).map(|(key, _)| *key))
}

/// Writes the secrets to files in `dir`; a file whose key is gone is removed.
///
/// # Errors
/// As [`check_secrets`], and when the files can't be written.
pub(crate) fn write_secrets(secrets: &HashMap<String, String>, dir: &Path) -> Result<(), Fault> {
    check_secrets(secrets)?;
    let io =
        |e: std::io::Error| Fault::failed(format!("the files of the volume's secret in {}: {e}", dir.display()), "");
    make_private_dir(dir).map_err(io)?;
    for (key, _) in FLAG_KEYS.iter().chain(&VARIABLE_KEYS) {
        write_or_remove(&dir.join(key), secrets.get(*key).map(String::as_bytes)).map_err(io)?;
    }
    let pairs = AWS_KEYS.iter().filter_map(|(key, name)| Some((name, secrets.get(*key)?)));
    let lines: String =
        pairs.map(|(name, value)| format!("{name} = {}\n", value.trim_end_matches(['\n', '\r']))).collect();
    let credentials = (!lines.is_empty()).then(|| format!("[default]\n{lines}"));
    write_or_remove(&dir.join(CREDENTIALS_FILE), credentials.as_ref().map(String::as_bytes)).map_err(io)
}

const CREDENTIALS_FILE: &str = "aws-credentials";

fn write_or_remove(file: &Path, content: Option<&[u8]>) -> std::io::Result<()> {
    let Some(content) = content else {
        return match std::fs::remove_file(file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
    };
    // A process that reads again gets the old file or the new file.
    replace_file(file, content, 0o600)
}

/// The flags and variables for the files that are in `dir`.
pub(crate) fn find_secrets(dir: &Path) -> SecretFiles {
    let file = |key: &str| Some(dir.join(key)).filter(|file| file.is_file()).map(|file| file.display().to_string());
    let pairs = |table: &[(&str, &str)]| -> Vec<(String, String)> {
        table.iter().filter_map(|(key, name)| Some(((*name).to_owned(), file(key)?))).collect()
    };
    let mut environment = pairs(&VARIABLE_KEYS);
    environment.extend(file(CREDENTIALS_FILE).map(|path| ("AWS_SHARED_CREDENTIALS_FILE".to_owned(), path)));
    SecretFiles { flags: pairs(&FLAG_KEYS), environment }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn secret(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn secrets_are_files_of_root_and_follow_changes() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("secret");
        let aws = [("AWS_ACCESS_KEY_ID", "id\n"), ("AWS_SECRET_ACCESS_KEY", "hush")];
        write_secrets(&secret(&[aws[0], aws[1], ("group-token", "word")]), &at).unwrap();
        let text = std::fs::read_to_string(at.join(CREDENTIALS_FILE)).unwrap();
        assert_eq!(text, "[default]\naws_access_key_id = id\naws_secret_access_key = hush\n");
        let mode = |file: &str| std::fs::metadata(at.join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("."), mode(CREDENTIALS_FILE), mode("group-token")), (0o700, 0o600, 0o600));
        let found = find_secrets(&at);
        assert_eq!(found.flags, [("group-token-file".to_owned(), at.join("group-token").display().to_string())]);
        assert_eq!(found.environment[0].0, "AWS_SHARED_CREDENTIALS_FILE");
        // A key that is gone takes its file with it.
        write_secrets(&secret(&[]), &at).unwrap();
        assert_eq!(find_secrets(&at), SecretFiles::default());
    }

    #[test]
    fn wrong_secrets_are_refused_and_never_shown() {
        for (pairs, says) in [
            (&[("AWS_ACCESS_KEY", "hush")][..], "did you mean AWS_ACCESS_KEY_ID?"),
            (&[("password", "hush")], "the keys are AWS_ACCESS_KEY_ID"),
            (&[("AWS_ACCESS_KEY_ID", "hush")], "no AWS_SECRET_ACCESS_KEY"),
            (&[("AWS_SESSION_TOKEN", "hush")], "no AWS_ACCESS_KEY_ID"),
            (&[("tls.crt", "hush")], "no tls.key"),
            (&[("AWS_ACCESS_KEY_ID", "hush hush"), ("AWS_SECRET_ACCESS_KEY", "x")], "a blank or a line break"),
        ] {
            let said = check_secrets(&secret(pairs)).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains("hush"), "{said}");
        }
    }
}
