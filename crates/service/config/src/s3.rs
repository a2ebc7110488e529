//! The S3 endpoint: settings and checks. Opens no file and no socket.

#[cfg(feature = "clap")]
use crate::values::parse_listen_address;
use crate::values::{SourceUrl, absolute_path};
use spurline_types::fault::Fault;
use std::net::SocketAddr;
use std::path::PathBuf;

settings! {
    /// The S3 endpoint.
    #[command(next_help_heading = "S3")]
    pub struct RawS3 {
        /// Serve S3 clients at this address and port: 127.0.0.1:9000, [::]:9000
        ///
        /// Without --s3-keys only at a loopback address, where every user of this host may read the sources.
        #[arg(long, value_name = "ADDR", value_parser = parse_listen_address)]
        pub s3_listen: Option<SocketAddr>,
        /// File with the keys of clients: a line ACCESS_KEY:SECRET[:ro][:PREFIX] for each, readable by its owner only (chmod 600)
        ///
        /// Requests are signed with them (AWS Signature Version 4, in headers or in the URL); others are refused. A
        /// key with `ro` only reads, and one with a prefix has the objects whose keys begin so; s3://BUCKET/PREFIX is for
        /// one of several buckets. The file is read again when it changes.
        #[arg(long, value_name = "FILE")]
        pub s3_keys: Option<PathBuf>,
        /// Take changes without --s3-keys: every user of this host may write as this process
        #[arg(long)]
        pub s3_writable_without_keys: bool,
        /// Name of the bucket: NAME, or NAME=SOURCE for each of several sources [default: the last folder of the source,
        /// or its bucket]
        #[arg(long, value_name = "NAME[=SOURCE]")]
        pub s3_bucket: Vec<String>,
        /// Buckets are also hosts below this name: BUCKET.NAME
        #[arg(long, value_name = "NAME")]
        pub s3_domain: Option<String>,
        /// Certificate of the endpoint in PEM, with its chain: clients use https:// then
        ///
        /// The files are read again when they change.
        #[arg(long, value_name = "FILE", requires = "s3_tls_key")]
        pub s3_tls_cert: Option<PathBuf>,
        /// Private key of that certificate in PEM
        #[arg(long, value_name = "FILE", requires = "s3_tls_cert")]
        pub s3_tls_key: Option<PathBuf>,
        /// Directory for the parts of uploads until they are in the source [default: the first cache directory, or that
        /// of temporary files]
        #[arg(long, value_name = "DIR")]
        pub s3_upload_dir: Option<PathBuf>,
    }
}

/// A certificate's files, absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate with its chain.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// A source as a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedBucket {
    /// The bucket's name.
    pub name: String,
    /// The source.
    pub source: SourceUrl,
}

/// An S3 endpoint, ready to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Config {
    /// Where to listen.
    pub listen: SocketAddr,
    /// The file of keys, absolute; `None` serves every client of this host.
    pub keys: Option<PathBuf>,
    /// `None` for connections without encryption.
    pub certificate: Option<CertificateFiles>,
    /// The name below which buckets are names of hosts.
    pub domain: Option<String>,
    /// A bucket for each source.
    pub buckets: Vec<NamedBucket>,
    /// Directory for parts of uploads, absolute; `None` for the default.
    pub upload_dir: Option<PathBuf>,
}

impl RawS3 {
    /// Checks the flags of the endpoint of these sources, which are changed or only read; `None` without an endpoint.
    ///
    /// # Errors
    /// Wrong values with exit code 2.
    pub fn check(self, sources: &[SourceUrl], writable: bool) -> Result<Option<S3Config>, Fault> {
        let Some(listen) = self.s3_listen else {
            return if self == RawS3::default() {
                Ok(None)
            } else {
                Err(Fault::usage(
                    "--s3-keys, --s3-writable-without-keys, --s3-bucket, --s3-domain, --s3-tls-cert, --s3-tls-key and --s3-upload-dir \
                     have no effect without an endpoint",
                    "give --s3-listen ADDRESS:PORT too, or leave them out",
                ))
            };
        };
        if self.s3_keys.is_none() && !listen.ip().is_loopback() {
            return Err(Fault::usage(
                format!(
                    "--s3-listen {listen} without --s3-keys: any host that reaches the address could read the sources"
                ),
                "give --s3-keys FILE with lines ACCESS_KEY:SECRET (umask 077), or listen on 127.0.0.1",
            ));
        }
        if writable && self.s3_keys.is_none() && !self.s3_writable_without_keys {
            return Err(Fault::usage(
                format!(
                    "--s3-listen {listen} with --writable and without --s3-keys: every user of this host could change the sources"
                ),
                "give --s3-keys FILE with lines ACCESS_KEY:SECRET (umask 077); or give --s3-writable-without-keys, if all users may",
            ));
        }
        let certificate = match (self.s3_tls_cert, self.s3_tls_key) {
            (Some(cert), Some(key)) => Some(CertificateFiles { cert: absolute_path(&cert), key: absolute_path(&key) }),
            (None, None) => None,
            _ => {
                return Err(Fault::usage(
                    "--s3-tls-cert and --s3-tls-key belong together, and one of them is missing",
                    "give both, or none",
                ));
            }
        };
        Ok(Some(S3Config {
            listen,
            keys: self.s3_keys.as_deref().map(absolute_path),
            certificate,
            domain: self.s3_domain,
            buckets: name_buckets(sources, &self.s3_bucket)?,
            upload_dir: self.s3_upload_dir.as_deref().map(absolute_path),
        }))
    }
}

/// A bucket for each source, with the given name or that of the source.
fn name_buckets(sources: &[SourceUrl], given: &[String]) -> Result<Vec<NamedBucket>, Fault> {
    let mut buckets: Vec<NamedBucket> = Vec::new();
    for word in given {
        let named = match word.split_once('=') {
            Some((name, source)) => {
                let source = source.parse().map_err(|why: String| {
                    Fault::usage(format!("--s3-bucket {word}: {why}"), "write NAME=SOURCE, with one of the sources")
                })?;
                NamedBucket { name: name.to_owned(), source }
            }
            None => match sources {
                [source] => NamedBucket { name: word.clone(), source: source.clone() },
                _ => {
                    return Err(Fault::usage(
                        format!(
                            "--s3-bucket {word}: there are several sources, and it is not said which has this name"
                        ),
                        format!("write --s3-bucket {word}=SOURCE"),
                    ));
                }
            },
        };
        if !sources.contains(&named.source) {
            return Err(Fault::usage(
                format!("--s3-bucket {word}: {} is no source here", named.source),
                "name one of the sources, as it is given",
            ));
        }
        buckets.push(named);
    }
    for source in sources {
        if !buckets.iter().any(|bucket| bucket.source == *source) {
            buckets.push(NamedBucket { name: bucket_name_of(source.as_str()), source: source.clone() });
        }
    }
    for (index, bucket) in buckets.iter().enumerate() {
        check_bucket_name(&bucket.name).map_err(|why| {
            Fault::usage(
                format!("{} as the bucket '{}': {why}", bucket.source, bucket.name),
                format!("give --s3-bucket NAME={}", bucket.source),
            )
        })?;
        if let Some(other) = buckets[..index].iter().find(|other| other.name == bucket.name) {
            return Err(Fault::usage(
                format!("{} and {} would both be the bucket {}", other.source, bucket.source, bucket.name),
                format!("give --s3-bucket NAME={}", bucket.source),
            ));
        }
    }
    Ok(buckets)
}

/// The length of a bucket's name.
const BUCKET_NAME_LENGTHS: std::ops::RangeInclusive<usize> = 3..=63;

/// The bucket's name for a source: the last folder of the source, or the bucket of a source without a folder. Capitals become
/// small letters, and characters that no bucket's name has become hyphens.
fn bucket_name_of(source: &str) -> String {
    let path = source.split_once("://").map_or(source, |(_, path)| path);
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let decoded = spurline_types::url::percent_decoded(last);
    String::from_utf8_lossy(&decoded)
        .chars()
        .map(bucket_character)
        .collect::<String>()
        .trim_matches(['-', '.'])
        .to_owned()
}

fn bucket_character(character: char) -> char {
    match character.to_ascii_lowercase() {
        known @ ('a'..='z' | '0'..='9' | '.' | '-') => known,
        _ => '-',
    }
}

/// Checks the rules of S3 for a bucket's name.
///
/// # Errors
/// The rule that the name breaks.
fn check_bucket_name(name: &str) -> Result<(), &'static str> {
    if !BUCKET_NAME_LENGTHS.contains(&name.len()) {
        return Err("a bucket's name has 3 to 63 characters");
    }
    if !name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-')) {
        return Err("a bucket's name has small letters, digits, dots and hyphens");
    }
    let ends = [name.as_bytes()[0], name.as_bytes()[name.len() - 1]];
    if !ends.iter().all(u8::is_ascii_alphanumeric) {
        return Err("a bucket's name begins and ends with a letter or a digit");
    }
    if name.contains("..") || name.parse::<std::net::Ipv4Addr>().is_ok() {
        return Err("a bucket's name has no two dots in a row, and is no address");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(words: &[&str]) -> Vec<SourceUrl> {
        words.iter().map(|word| word.parse().unwrap()).collect()
    }

    fn named(words: &[&str], given: &[&str]) -> Result<Vec<String>, String> {
        let given: Vec<String> = given.iter().map(ToString::to_string).collect();
        let buckets = name_buckets(&sources(words), &given).map_err(|fault| fault.to_string())?;
        Ok(buckets.into_iter().map(|bucket| bucket.name).collect())
    }

    #[test]
    fn buckets_have_the_names_of_their_sources_or_given_ones() {
        assert_eq!(named(&["s3://data", "/srv/Data_Sets"], &[]).unwrap(), ["data", "data-sets"]);
        assert_eq!(named(&["/srv/x"], &["work"]).unwrap(), ["work"]);
        assert_eq!(named(&["s3://data", "/x"], &["work=/x"]).unwrap(), ["work", "data"]);
        for (words, given, part) in [
            (&["/srv/x"][..], &[][..], "--s3-bucket NAME=file:///srv/x"),
            (&["s3://data", "/srv/data"], &[], "both be the bucket data"),
            (&["s3://data", "/srv/data"], &["work"], "which has this name"),
            (&["s3://data"], &["work=s3://other"], "no source here"),
            (&["s3://data"], &["No"], "3 to 63"),
        ] {
            let why = named(words, given).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn without_keys_only_this_host_is_served() {
        let at = |address: &str, keys: bool| {
            let s3_listen = Some(address.parse().unwrap());
            let raw = RawS3 { s3_listen, s3_keys: keys.then(|| "/k".into()), ..RawS3::default() };
            raw.check(&sources(&["s3://data"]), false)
        };
        assert!(at("127.0.0.1:9000", false).unwrap().is_some() && at("[::1]:9000", false).unwrap().is_some());
        assert!(at("10.0.0.1:9000", true).unwrap().is_some());
        for open in ["10.0.0.1:9000", "0.0.0.0:9000"] {
            let why = at(open, false).unwrap_err().to_string();
            assert!(why.contains("--s3-keys FILE"), "{why}");
        }
        let alone = RawS3 { s3_keys: Some("/k".into()), ..RawS3::default() };
        assert!(alone.check(&[], false).unwrap_err().to_string().contains("--s3-listen"));
        assert_eq!(RawS3::default().check(&[], true).unwrap(), None);
    }

    #[test]
    fn changes_require_keys_or_a_flag() {
        let at = |s3_keys: Option<PathBuf>, s3_writable_without_keys| {
            let s3_listen = Some("127.0.0.1:9000".parse().unwrap());
            RawS3 { s3_listen, s3_keys, s3_writable_without_keys, ..RawS3::default() }
                .check(&sources(&["s3://data"]), true)
        };
        assert!(at(Some("/k".into()), false).is_ok() && at(None, true).is_ok());
        let why = at(None, false).unwrap_err().to_string();
        assert!(why.contains("every user of this host") && why.contains("--s3-writable-without-keys"), "{why}");
    }

    #[test]
    fn bucket_names_follow_the_rules() {
        for (source, name) in [
            ("s3://datasets", "datasets"),
            ("s3://datasets/ImageNet_1k/", "imagenet-1k"),
            ("gs://my.bucket", "my.bucket"),
            ("file:///srv/Data%20Sets", "data-sets"),
            ("file:///", ""),
        ] {
            assert_eq!(bucket_name_of(source), name, "{source}");
        }
        check_bucket_name("data-sets.2").unwrap();
        for wrong in ["", "ab", "-ab", "ab-", "a..b", "10.0.0.1", "Abc", "a_b", &"a".repeat(64)] {
            check_bucket_name(wrong).unwrap_err();
        }
    }
}
