//! The addresses that requests may be sent to, checked on the address that is connected to.
//!
//! Names are resolved once, by [`AddressResolver`], which drops the addresses that a rule forbids. So the
//! owner of a name cannot lead elsewhere by a second answer. A literal address needs no resolver, and is checked before
//! the request.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex};

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::threads::lock;

/// The metadata server of Amazon's cloud that has an address of version 6.
const METADATA_ADDRESS: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// The rule for addresses that a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressRule {
    /// Any, also those of metadata servers.
    Any,
    /// Any but metadata servers and other link-local addresses.
    NoMetadata,
    /// Only addresses of the internet.
    Public,
}

impl AddressRule {
    pub fn allows(self, address: IpAddr) -> bool {
        match self {
            AddressRule::Any => true,
            AddressRule::NoMetadata => !is_link_local(address),
            AddressRule::Public => !is_private(address),
        }
    }
}

/// A name has no address that the rule allows.
#[derive(Debug, thiserror::Error)]
#[error("the host has only addresses that are refused")]
pub struct AddressRefused(pub AddressRule);

/// Resolves names to the addresses that a rule allows. The proxies that the environment names are exempt: they resolve
/// the names of other hosts.
#[derive(Clone, Debug)]
pub struct AddressResolver {
    rule: AddressRule,
    proxies: Arc<HashSet<String>>,
    /// The addresses of the proxies, as far as they are known.
    proxy_addresses: Arc<Mutex<HashSet<IpAddr>>>,
}

impl AddressResolver {
    pub fn new(rule: AddressRule) -> AddressResolver {
        let urls = ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"].into_iter().flat_map(|name| {
            [name.to_owned(), name.to_ascii_lowercase()].map(|name| std::env::var(name).ok())
        });
        let hosts: HashSet<String> = urls
            .flatten()
            .filter_map(|text| {
                let has_scheme = text.contains("://");
                let url = if has_scheme { text } else { format!("http://{text}") };
                Some(url.parse::<Url>().ok()?.host_str()?.to_owned())
            })
            .collect();
        let literal = hosts.iter().filter_map(|host| parse_literal(host)).collect();
        let proxy_addresses = Arc::new(Mutex::new(literal));
        AddressResolver { rule, proxies: Arc::new(hosts), proxy_addresses }
    }

    /// The same with another rule.
    pub fn with_rule(&self, rule: AddressRule) -> AddressResolver {
        AddressResolver { rule, ..self.clone() }
    }

    /// Whether the server that answered is one of the internet, by its address. Behind a proxy only a literal address is
    /// known to be private.
    pub fn is_public(&self, url: &Url, connected: Option<IpAddr>) -> bool {
        match (literal_address(url), connected) {
            (Some(literal), _) => !is_private(literal),
            (None, Some(address)) => {
                !is_private(address) || lock(&self.proxy_addresses).contains(&address)
            }
            (None, None) => true,
        }
    }
}

impl Resolve for AddressResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = self.clone();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let is_proxy = resolver.proxies.contains(name.as_str());
            let mut allowed = Vec::new();
            for address in found {
                if is_proxy {
                    lock(&resolver.proxy_addresses).insert(address.ip());
                }
                if is_proxy || resolver.rule.allows(address.ip()) {
                    allowed.push(address);
                }
            }
            match allowed.is_empty() {
                true => Err(AddressRefused(resolver.rule).into()),
                false => Ok(Box::new(allowed.into_iter()) as Addrs),
            }
        })
    }
}

fn parse_literal(host: &str) -> Option<IpAddr> {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host).parse().ok()
}

/// The address that a URL has instead of a name.
pub fn literal_address(url: &Url) -> Option<IpAddr> {
    parse_literal(url.host_str()?)
}

/// The addresses of version 4 that an address of version 6 leads to, by the ways of translation and tunnels.
fn embedded_addresses(address: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
    let s = address.segments();
    let v4 = |high: u16, low: u16| Some(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    let found = match s {
        // Mapped, translated, and of old "compatible".
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0, 0, 0, 0, 0xffff, 0, high, low] => {
            [v4(high, low), None]
        }
        // NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => [v4(high, low), None],
        // 6to4.
        [0x2002, high, low, ..] => [v4(high, low), None],
        // Teredo: the server, and the client with its bits inverted.
        [0x2001, 0, server_high, server_low, _, _, high, low] => {
            [v4(server_high, server_low), v4(!high, !low)]
        }
        _ => [None, None],
    };
    found.into_iter().flatten()
}

/// Whether an address is link-local, or that of a metadata server.
pub fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => {
            v6.is_unicast_link_local()
                || v6 == METADATA_ADDRESS
                || embedded_addresses(v6).any(|v4| v4.is_link_local())
        }
    }
}

/// Whether an address is that of no host of the internet.
pub fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_private_v4(v4),
        IpAddr::V6(v6) => {
            let s = v6.segments();
            // Of a site, as such addresses were once given, and NAT64 with a prefix of a network's own.
            let is_site_local = s[0] & 0xffc0 == 0xfec0;
            let is_local_nat64 = s[..3] == [0x64, 0xff9b, 1];
            v6.is_loopback()
                || v6.is_unspecified()
                || v6.is_unique_local()
                || v6.is_unicast_link_local()
                || v6.is_multicast()
                || is_site_local
                || is_local_nat64
                || embedded_addresses(v6).any(is_private_v4)
        }
    }
}

fn is_private_v4(v4: Ipv4Addr) -> bool {
    let [a, b, c, _] = v4.octets();
    v4.is_private()
        || v4.is_loopback()
        || v4.is_link_local()
        || v4.is_multicast()
        // This network, and what is reserved.
        || a == 0
        || a >= 240
        // Addresses that a provider shares among customers, of protocols, and of measurements.
        || (a == 100 && b & 0xc0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && b & 0xfe == 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_those_of_no_host_of_the_internet() {
        for address in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "0.1.2.3",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fd00::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "::ffff:0:10.0.0.1",
            "::10.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::808:808",
            "2002:a00:1::1",
            "2002:a9fe:a9fe::",
            // Teredo, with the client 192.168.1.1 and then with the server 10.0.0.1.
            "2001:0:4136:e378:8000:63bf:3f57:fefe",
            "2001:0:a00:1:8000:63bf:f7f7:f7f7",
        ] {
            assert!(is_private(address.parse().unwrap()), "{address}");
        }
        for address in [
            "8.8.8.8",
            "100.128.0.1",
            "172.32.0.1",
            "198.20.0.1",
            "2606:4700::1111",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
            "2002:808:808::1",
            "2001:0:4136:e378:8000:63bf:f7f7:f7f7",
        ] {
            assert!(!is_private(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn metadata_servers_are_known_by_every_form_of_their_addresses() {
        for address in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "fe80::1",
            "fd00:ec2::254",
        ] {
            assert!(is_link_local(address.parse().unwrap()), "{address}");
            assert!(!AddressRule::NoMetadata.allows(address.parse().unwrap()), "{address}");
        }
        assert!(AddressRule::NoMetadata.allows("10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn a_url_has_its_literal_address_in_any_spelling() {
        let literal = |text: &str| literal_address(&text.parse().unwrap());
        let loopback = Some("127.0.0.1".parse().unwrap());
        for text in
            ["http://127.0.0.1:80/", "http://2130706433/a", "http://0x7f.1/", "http://127.1"]
        {
            assert_eq!(literal(text), loopback, "{text}");
        }
        assert_eq!(literal("https://[::1]:9000/a"), Some("::1".parse().unwrap()));
        assert_eq!(literal("https://host/a"), None);
    }

    #[test]
    fn the_source_is_public_by_the_address_that_answered() {
        let resolver = AddressResolver {
            rule: AddressRule::Any,
            proxies: Arc::default(),
            proxy_addresses: Arc::new(Mutex::new(HashSet::from(["10.0.0.9".parse().unwrap()]))),
        };
        let is_public = |url: &str, address: &str| {
            resolver.is_public(&url.parse().unwrap(), address.parse().ok())
        };
        assert!(is_public("https://host/", "8.8.8.8"));
        assert!(!is_public("https://host/", "10.0.0.1"));
        // A proxy's address says nothing of the host.
        assert!(is_public("https://host/", "10.0.0.9"));
        assert!(!is_public("https://10.0.0.1/", "10.0.0.9"));
        assert!(is_public("https://host/", ""));
    }

    #[tokio::test]
    async fn a_name_has_the_addresses_that_the_rule_allows() {
        let resolver = AddressResolver::new(AddressRule::Any);
        let name = || "localhost".parse::<Name>().unwrap();
        assert!(resolver.resolve(name()).await.unwrap().all(|address| is_private(address.ip())));
        let refused = resolver.with_rule(AddressRule::Public).resolve(name()).await;
        assert!(refused.is_err_and(|error| error.is::<AddressRefused>()));
    }
}
