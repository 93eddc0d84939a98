// SPDX-License-Identifier: Apache-2.0

//! Where the server is, and how calls prove who they are.

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

use crate::client::BallastClient;
use crate::error::ClientError;

pub(crate) type KeyedChannel = InterceptedService<Channel, KeyInterceptor>;

/// Adds the API key to each call.
#[derive(Clone, Debug)]
pub(crate) struct KeyInterceptor {
    authorization: Option<MetadataValue<Ascii>>,
}

impl Interceptor for KeyInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        Ok(request)
    }
}

/// Certificates for an `https` URL, in PEM.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: ClientTlsConfig,
}

impl ClientTls {
    /// Trusts servers whose certificate one of these roots has signed.
    pub fn with_roots(pem: impl AsRef<[u8]>) -> Self {
        Self { config: ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)) }
    }

    /// Shows a certificate, for mutual TLS.
    #[must_use]
    pub fn identity(self, certificate_pem: impl AsRef<[u8]>, key_pem: impl AsRef<[u8]>) -> Self {
        Self { config: self.config.identity(Identity::from_pem(certificate_pem, key_pem)) }
    }

    /// Expects a certificate for this name instead of the URL's host.
    #[must_use]
    pub fn server_name(self, name: impl Into<String>) -> Self {
        Self { config: self.config.domain_name(name) }
    }
}

#[derive(Clone, Debug)]
#[must_use]
pub struct ClientBuilder {
    url: String,
    api_key: Option<String>,
    tls: Option<ClientTls>,
}

impl ClientBuilder {
    pub(crate) fn new(url: String) -> Self {
        Self { url, api_key: None, tls: None }
    }

    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.api_key = Some(key.into());
        self
    }

    pub fn tls(mut self, tls: ClientTls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Connects once. The connection is made again when it breaks.
    pub async fn connect(self) -> Result<BallastClient, ClientError> {
        let Self { url, api_key, tls } = self;
        let authorization = api_key
            .map(|key| format!("Bearer {key}").parse().map_err(|_| ClientError::ApiKey))
            .transpose()?
            .map(|mut value: MetadataValue<Ascii>| {
                value.set_sensitive(true);
                value
            });
        let endpoint = Endpoint::from_shared(url.clone());
        let mut endpoint = endpoint.map_err(|source| ClientError::Url { url: url.clone(), source })?;
        if let Some(tls) = tls {
            endpoint = endpoint.tls_config(tls.config).map_err(|source| ClientError::Tls { source })?;
        }
        let channel = endpoint.connect().await.map_err(|source| ClientError::Connect { url, source })?;
        Ok(BallastClient::new(InterceptedService::new(channel, KeyInterceptor { authorization })))
    }
}
