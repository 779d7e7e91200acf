{{/* Names: of the release, and of one part of it. */}}
{{- define "millstream.name" -}}
{{- if contains "millstream" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-millstream{{ end }}
{{- end }}

{{- define "millstream.selector" -}}
app.kubernetes.io/name: millstream
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .worker }}
millstream/worker: {{ . }}
{{- end }}
{{- end }}

{{- define "millstream.labels" -}}
{{ include "millstream.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "millstream.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The longest a process needs to end, with a little to spare, in whole seconds. */}}
{{- define "millstream.grace" -}}
{{ add 10 (ceil (float64 (get .Values.settings "DRAIN_S" | default 20))) }}
{{- end }}

{{/* A setting's value; a million is not to become 1e+06. */}}
{{- define "millstream.value" -}}
{{ ternary . (toJson .) (kindIs "string" .) | quote }}
{{- end }}

{{/* All of what each pod has in common. */}}
{{- define "millstream.pod" -}}
automountServiceAccountToken: false
serviceAccountName: {{ include "millstream.name" . }}
# A Service named millstream would set MILLSTREAM_PORT=tcp://…, which is no port.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "millstream.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "millstream.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The chart's own Redis is used when none is named. */}}
{{- define "millstream.ownRedis" -}}
{{- if not (or .Values.redis.url .Values.redis.existingSecret) }}yes{{ end }}
{{- end }}

{{- define "millstream.redisEnv" -}}
- name: MILLSTREAM_REDIS_URL
{{- if .Values.redis.existingSecret }}
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: url}}
{{- else }}
  value: {{ .Values.redis.url | default (printf "redis://%s-redis:6379/0" (include "millstream.name" .)) | quote }}
{{- end }}
{{- end }}

{{/* A worker of the list over the defaults, as YAML. */}}
{{- define "millstream.worker" -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) .worker | toYaml }}
{{- end }}
